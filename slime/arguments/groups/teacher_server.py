"""The Megatron log-prob server."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, flag


class TeacherServer(ArgumentGroup):
    """A server that answers with log-probs of a Megatron model."""

    title = "teacher server"

    teacher_port: int = flag(7999, "port of the teacher server", gt=0)
    teacher_warmup_port: int = flag(7999, "port of the teacher server during warm-up", gt=0)
    teacher_warmup_timeout_s: int = flag(3000, "seconds the warm-up of the teacher server may take", gt=0)
    teacher_sample_reduction_chunk_size: int = flag(4096, "tokens per chunk of the sample reduction", gt=0)
    teacher_label_reduction_chunk_size: int = flag(4096, "tokens per chunk of the label reduction", gt=0)
    megatron_server_max_length: int = flag(0, "largest number of tokens of a sequence; 0: no limit", ge=0)
    megatron_server_update_timeout_s: float = flag(3600.0, "seconds a weight update may take", gt=0)
    megatron_server_warmup: bool | None = flag(None, "warm up before serving; default: yes")
