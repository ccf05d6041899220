"""The doctor: what it finds here is so, what is broken is a fault, and models are judged as `enable` judges them."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from lrmoe.cli import app, exit_code
from lrmoe.doctor import command, machine, paths, trial, workers
from lrmoe.doctor.finding import Finding
from lrmoe.doctor.model import look_at
from lrmoe.errors import ConfigError, RankError
from lrmoe.telemetry.figures import installed_version
from tests.integrations.models import config_of


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.distributed
def test_the_command_finds_this_machine_usable() -> None:
    arguments = ["-m", "lrmoe", "doctor", "--json", "--model", "glm4-moe-tiny"]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "usable"
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert lines["doctor.versions.torch"]["context"]["text"] == torch.__version__
    assert lines["doctor.backends.gloo"]["value"] == 1
    assert 0 <= lines["doctor.self-test.two_ranks"]["value"] < 1e-10
    assert lines["doctor.link.gloo_bytes_per_s"]["value"] > 1e6
    assert 0 < lines["doctor.link.gloo_latency_s"]["value"] < 1
    assert "16 experts" in lines["doctor.model.experts"]["context"]["text"]


def test_the_self_test_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    good = trial._verdict("one", [workers.layer_errors(None)])
    assert good.state == "ok"
    assert good.value is not None
    assert good.value < 1e-14
    monkeypatch.setattr("lrmoe.layer.experts.grouped_mm_input", lambda grad, *_, out: out.zero_())
    bad = trial._verdict("one", [workers.layer_errors(None)])
    assert bad.state == "fault"
    missing = trial._verdict("one", [{"output": 0.0}])
    assert missing.state == "fault"
    assert "no d_hidden_states" in missing.text


def test_ranks_that_cannot_start_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RankError("no route to host\nand more")

    monkeypatch.setattr(trial, "run_workers", fail)
    found = list(trial.trial())
    assert [one.state for one in found if one.name == "two ranks"] == ["fault"]
    assert found[0].text == "RankError: no route to host"


def test_a_fault_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for state, code in (("ok", 0), ("no", 0), ("fault", 1)):
        finding = Finding(area="backends", name="gloo", state=state, text="[why] not")
        monkeypatch.setattr(command, "_machine", lambda finding=finding: iter([finding]))
        assert command.doctor(model=None, as_json=False) == code
        assert ("fault: backends, gloo: [why] not" in capsys.readouterr().out) == (code == 1)


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ("pyarrow", "safetensors")
    monkeypatch.setattr(
        machine, "installed_version", lambda name: None if name in missing else installed_version(name)
    )
    found = by_name(machine.versions())
    assert found["safetensors"].state == "fault"
    assert found["traces"].state == "no"
    assert 'pip install -e ".[traces]"' in found["traces"].text
    assert found["report"].state == "ok"


def test_what_is_too_old_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"torch": "2.9.1+cu126", "pyarrow": "17.0.0", "rich": "13"}
    monkeypatch.setattr(machine, "installed_version", lambda name: old.get(name) or installed_version(name))
    found = by_name(machine.versions())
    assert found["torch"].state == "fault"
    assert found["torch"].text == "torch 2.9.1+cu126 is too old: 2.11 or newer is needed"
    assert found["traces"].text.startswith("pyarrow 17.0.0 is too old: 18 or newer is needed: pip install")
    assert found["rich"].state == "info"
    for python, state in (("3.10.4", "fault"), ("3.11.0", "info"), ("3.13.9", "info"), ("3.14.0", "fault")):
        monkeypatch.setattr(platform, "python_version", lambda python=python: python)
        assert machine._python().state == state


def test_every_extra_of_the_project_is_looked_for() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    names = [line.split(" = ")[0] for line in section.splitlines() if " = [" in line]
    assert set(names) - {"dev"} == set(machine.EXTRAS)


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemAvailable: 6291456 kB\n",
        "/sys/fs/cgroup/memory.max": f"{2 * 2**30}\n",
        "/sys/fs/cgroup/memory.current": f"{2**30}\n",
    }
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    assert machine._memory() == (2 * 2**30, 2**30)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine._memory()[1] == 6 * 2**30


def test_grouped_products_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(finding.state == "no" for finding in paths.fast_paths() if "cpu" in finding.name)
    assert "a loop over experts is taken on CPU" in paths._grouped("cpu", torch.bfloat16).text
    right = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: right(*a, **k) * 1.5)
    assert "wrong numbers" in paths._grouped("cpu", torch.bfloat16).text

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("not on this device\nat line 3")

    monkeypatch.setattr(F, "grouped_mm", refuse)
    assert paths._grouped("cpu", torch.float16).text == "not taken: RuntimeError: not on this device"
    monkeypatch.delattr(F, "grouped_mm")
    assert "has none" in paths._grouped("cpu", torch.float32).text


def test_triton_kernels_are_tried_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(paths, "missing", lambda: None)
    assert paths._triton().text == "not taken: there is no CUDA device"
    monkeypatch.setattr(paths, "missing", lambda: "triton cannot be imported")
    assert paths._triton().text == "not taken: triton cannot be imported"
    troubles: dict[str, str | None] = {"cuda:0": None, "cuda:1": "no compiler"}
    monkeypatch.setattr(torch, "empty", lambda *_, device: device)
    monkeypatch.setattr(paths, "usable", troubles.get)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (paths._triton().state, paths._triton().text) == ("no", "not taken: no compiler")
    troubles["cuda:1"] = None
    assert paths._triton().state == "ok"


def test_a_folder_of_a_supported_model(tmp_path: Path) -> None:
    config_of("qwen3").save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        found = by_name(look_at(str(place)))
        assert found["experts"].state == "ok"
        assert "2 MoE layers of 8 experts, hidden 32, width 16, silu" in found["experts"].text
        assert found["experts"].text.endswith("over 1, 2, 4, 8 ranks")


@pytest.mark.filterwarnings("ignore")
def test_a_refused_model_names_its_flags(tmp_path: Path) -> None:
    config_of("gpt_oss").save_pretrained(tmp_path)
    refused = [one for one in look_at(str(tmp_path)) if one.state == "fault"]
    assert len(refused) == 1, "the same reason of every layer once"
    assert "2 of 2 experts modules: (GptOssExperts): lrmoe does not support has_bias=True" in refused[0].text


def test_a_model_without_experts_and_a_quantised_one(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    assert "no experts module" in by_name(look_at(str(tmp_path)))["experts"].text
    config = config_of("qwen3").to_dict() | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert by_name(look_at(str(tmp_path)))["weights"].state == "fault"


def test_nothing_is_downloaded_for_a_name_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a look-up over the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ConfigError, match=r"doctor downloads nothing: .*hf download no/such-model") as raised:
        list(look_at("no/such-model"))
    assert exit_code(raised.value) == 2
    done = CliRunner().invoke(app, ["doctor", "--model", "no/such-model"])
    assert isinstance(done.exception, ConfigError)
