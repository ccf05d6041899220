"""What a rank holds and what is allocated, against sizes known beforehand."""

from __future__ import annotations

import torch

from lrmoe.simulate.replay_memory import Allocated, Held, allocations


def test_held_keeps_the_most_and_its_parts() -> None:
    held = Held()
    small, large = torch.empty(4), torch.empty(100)
    held.add("rows", small, small)
    held.add("stash", large)
    held.drop("stash")
    held.replace("rows", small)
    assert (held.most, held.parts) == (432, {"rows": 32, "stash": 400})
    held.restart()
    assert (held.most, held.parts) == (16, {"rows": 16})


def test_allocations_count_each_storage_while_it_lives() -> None:
    given = torch.zeros(1000)
    with allocations(torch.device("cpu")) as counted:
        assert isinstance(counted, Allocated)
        first = torch.empty(50)
        view = first.view(5, 10)[1:]
        del first  # its memory stays with the view
        given.add_(1)
        torch.add(given, 1, out=given)
        given[:10].mul_(2)
        assert (counted.now, counted.most) == (200, 200)
        second = given * 2
        assert counted.now == 4200
        del view, second
        assert (counted.now, counted.most) == (0, 4200)
        counted.restart()
        assert counted.most == 0
        third = torch.arange(8).nonzero()
        assert counted.most >= third.nbytes == 56
