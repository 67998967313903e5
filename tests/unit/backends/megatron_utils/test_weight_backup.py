"""Weights of several roles take turns in one model without changing."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.train.weight_backup import WeightBackup


def test_roles_take_turns_in_the_same_tensors() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    reference = {name: t.clone() for name, t in model.state_dict().items()}
    backup = WeightBackup([model], active="actor")
    backup.save("ref")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    actor = {name: t.clone() for name, t in model.state_dict().items()}
    storage = [p.data_ptr() for p in model.parameters()]

    backup.save("actor")
    backup.activate("ref")
    assert all(torch.equal(t, reference[name]) for name, t in model.state_dict().items())
    backup.activate("actor")
    assert all(torch.equal(t, actor[name]) for name, t in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == storage

    backup.copy("actor", "ref")
    backup.activate("ref")
    assert all(torch.equal(t, actor[name]) for name, t in model.state_dict().items())


def test_unknown_tag_names_the_known_ones() -> None:
    backup = WeightBackup([torch.nn.Linear(1, 1)], active="actor")
    backup.save("ref")
    with pytest.raises(KeyError, match=r"'teacher'.*ref"):
        backup.activate("teacher")


def test_the_copy_of_what_is_in_the_model_can_be_given_back() -> None:
    model = torch.nn.Linear(3, 2)  # 8 numbers
    backup = WeightBackup([model], active="actor")
    backup.forget_active()  # there is none
    backup.save("ref")
    backup.save("actor")
    assert backup.host_bytes == 2 * 8 * 4
    backup.forget_active()
    assert backup.tags == ["ref"]
    assert backup.host_bytes == 8 * 4
    weights = model.weight.detach().clone()
    backup.save("actor")  # as every pass does before it swaps
    with torch.no_grad():
        model.weight.zero_()
    backup.save("ref")
    backup.activate("ref")
    backup.activate("actor")
    assert torch.equal(model.weight, weights)


@pytest.mark.gpu
def test_copies_are_pinned_and_made_once_on_a_device() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).cuda().bfloat16()
    first = {name: t.clone() for name, t in model.state_dict().items()}
    backup = WeightBackup([model], active="actor")
    backup.save("ref")
    copies = backup._copies["ref"]
    pieces = [piece for copy in copies.values() for piece in copy.pieces]
    assert all(piece.is_pinned() and not piece.is_cuda for piece in pieces)
    places = [piece.data_ptr() for piece in pieces]
    device_memory = torch.cuda.memory_allocated()
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        now = {name: t.clone() for name, t in model.state_dict().items()}
        backup.save("actor")
        backup.activate("ref")
        assert all(torch.equal(t, first[name]) for name, t in model.state_dict().items())
        backup.activate("actor")
        assert all(torch.equal(t, now[name]) for name, t in model.state_dict().items())
        del now
    backup.copy("actor", "ref")
    assert [piece.data_ptr() for copy in backup._copies["ref"].values() for piece in copy.pieces] == places
    assert torch.cuda.memory_allocated() == device_memory
