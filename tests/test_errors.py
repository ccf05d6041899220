from __future__ import annotations

import pytest

from lrmoe.errors import MissingExtraError, did_you_mean, require_extra


def test_a_near_name_is_suggested_and_a_far_one_is_not() -> None:
    assert did_you_mean("memorize", ("scratch", "memorise")) == " (did you mean 'memorise'?)"
    assert did_you_mean("zzz", ("scratch", "memorise")) == ""
    assert did_you_mean("h20x", {"h200": 0}, cutoff=0.95) == ""


def test_a_missing_extra_says_how_to_get_it() -> None:
    assert require_extra("json", "report").dumps([]) == "[]"
    with pytest.raises(MissingExtraError, match=r"no_such_module is needed .*\[report\]"):
        require_extra("no_such_module", "report")
