"""Where flags come from besides the command line, and what is done with them instead of a run."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, DottedPath, flag


class Configuration(ArgumentGroup):
    """Configuration files and the dry run."""

    title = "configuration"

    config: str | None = flag(
        None, "YAML file of flags, for example one written by --dump-config; flags on the command line win"
    )
    dump_config: str | None = flag(None, "write the resolved configuration to this YAML file")
    dry_run: bool = flag(
        False,
        "check everything without Ray, engines, GPUs or network; print configuration, batch sizes, placement and "
        "memory, then exit",
    )
    custom_config_path: str | None = flag(
        None, "YAML mapping whose keys are set on the namespace (the values of your own plug-ins)"
    )
    custom_arguments_path: DottedPath | None = flag(
        None,
        "dotted path of your own function(parser), which adds flags of yours and returns the parser; default: "
        "$SLIME_CUSTOM_ARGUMENTS_PATH",
    )
    ignore_unknown_flags: bool = flag(False, "warn about unknown flags instead of refusing them (old launch scripts)")
