from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lrmoe.errors import ConfigError
from lrmoe.training.config import DataConfig
from lrmoe.training.data import Corpus


def numbered(size: int = 5000) -> Corpus:
    """A corpus in which a token's value tells its position."""
    tokens = np.arange(size, dtype=np.int32)
    return Corpus(tokens=tokens, vocab_size=size, held_out=500, name="numbers")


def batch(corpus: Corpus, **changes: int) -> torch.Tensor:
    arguments = {"seed": 1, "step": 3, "micro_batch": 0, "rank": 0, "world_size": 1, "size": 4, "seq_len": 16}
    return corpus.train_batch(**{**arguments, **changes})


def test_the_same_counters_give_the_same_batch_and_others_another() -> None:
    corpus = numbered()
    first = batch(corpus)
    assert first.shape == (4, 17)
    assert first.dtype == torch.int64
    assert torch.equal(first, batch(corpus))
    for change in ({"seed": 2}, {"step": 4}, {"micro_batch": 1}, {"rank": 1, "world_size": 2}):
        assert not torch.equal(first, batch(corpus, **change))


def test_a_step_reads_the_same_text_however_it_is_spread() -> None:
    corpus = numbered()
    whole = batch(corpus, size=8)
    ranks = [batch(corpus, size=4, rank=r, world_size=2) for r in range(2)]
    micro = [batch(corpus, size=2, micro_batch=m, rank=r, world_size=2) for m in range(2) for r in range(2)]
    assert torch.equal(whole, torch.cat(ranks))
    assert torch.equal(whole, torch.cat(micro))


def test_training_never_reads_held_out_text_and_covers_the_rest() -> None:
    corpus = numbered()
    seen = torch.cat([batch(corpus, step=s, size=64) for s in range(200)]).flatten()
    assert seen.max() == 4499
    assert seen.min() == 0
    assert len(seen.unique()) == 4500


def test_held_out_batches_lie_in_the_held_out_part_and_spread_over_it() -> None:
    corpus = numbered()
    rows = torch.cat([corpus.held_out_batch(number=i, total=4, size=2, seq_len=16) for i in range(4)])
    assert rows.min() == 4500
    assert rows.max() < 5000
    assert rows[-1, 0] > 4900
    assert torch.equal(rows[:, 0], rows[:, 0].sort().values)


def test_bytes_and_separators(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\xff" + b"b" * 60)
    (tmp_path / "a.txt").write_bytes(b"a" * 60)
    (tmp_path / "image.bin").write_bytes(b"\0" * 60)
    (tmp_path / ".hidden").write_bytes(b"h" * 60)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "tests").mkdir()  # left out of the standard library, not of a user's text
    (tmp_path / "tests" / "c").write_bytes(b"c" * 60)
    corpus = Corpus.load(DataConfig(path=str(tmp_path), seq_len=8, held_out=0.0))
    assert corpus.tokens.tolist() == [97] * 60 + [256] + [255] + [98] * 60 + [256] + [99] * 60 + [256]
    assert corpus.vocab_size == 258


def test_the_default_corpus_is_the_standard_library() -> None:
    corpus = Corpus.load(DataConfig())
    assert len(corpus.tokens) > 5_000_000
    text = bytes(t for t in corpus.tokens[:200_000].tolist() if t < 256)
    assert b"import" in text
    assert Corpus.load(DataConfig()).fingerprint == corpus.fingerprint


def test_a_tokenizer_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "one": 1, "two": 2, "[SEP]": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("one two two " * 20)
    corpus = Corpus.load(
        DataConfig(
            path=str(tmp_path / "text.txt"),
            tokenizer=str(tmp_path / "tokenizer.json"),
            seq_len=4,
            held_out=0.0,
        )
    )
    assert corpus.tokens.tolist() == [1, 2, 2] * 20 + [3]
    assert corpus.vocab_size == 4


def test_unreadable_corpora_name_their_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such.*no such file"):
        Corpus.load(DataConfig(path=str(tmp_path / "no-such")))
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"empty.txt.*tokens"):
        Corpus.load(DataConfig(path=str(empty)))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "image.bin").write_bytes(b"\0" * 60)
    (folder / "empty.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"no text files under {folder}"):
        Corpus.load(DataConfig(path=str(folder)))
    short = tmp_path / "short.txt"
    short.write_text("x" * 100)
    with pytest.raises(ConfigError, match=r"short.txt.*seq_len=256"):
        Corpus.load(DataConfig(path=str(short)))
    with pytest.raises(ConfigError, match=r"short.txt.*not a tokenizer"):
        Corpus.load(DataConfig(path=str(short), tokenizer=str(short)))


@pytest.mark.parametrize(("held_out", "least"), [(0.0, 10), (0.01, 19), (0.75, 37)])
def test_a_short_corpus_is_told_how_much_is_enough(tmp_path: Path, held_out: float, least: int) -> None:
    path = tmp_path / "short.txt"
    data = DataConfig(path=str(path), seq_len=8, held_out=held_out)
    path.write_text("x" * (least - 2))  # a separator follows
    with pytest.raises(ConfigError, match=f": {least - 1} tokens; .*needs at least {least}$"):
        Corpus.load(data)
    path.write_text("x" * (least - 1))
    corpus = Corpus.load(data)
    assert len(corpus.tokens) == least
    assert corpus.train_batch(
        seed=0, step=0, micro_batch=0, rank=0, world_size=1, size=2, seq_len=8
    ).shape == (2, 9)


def test_the_log_says_how_much_was_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("x" * 99)
    with caplog.at_level(logging.INFO):
        Corpus.load(DataConfig(path=str(tmp_path), seq_len=8, held_out=0.1))
        Corpus.load(DataConfig(path=str(tmp_path / "a"), seq_len=8, held_out=0.1))
    assert caplog.messages == [
        f"text: {tmp_path}, 2 files, 200 tokens, 20 of them held out",
        f"text: {tmp_path / 'a'}, 1 file, 100 tokens, 10 of them held out",
    ]


def test_a_reason_does_not_repeat_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("x" * 99)

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError) as caught:
        Corpus.load(DataConfig(path=str(path)))
    assert str(caught.value) == f"data.path={str(path)!r}: cannot be read: Permission denied"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x" * 1000)
    path.chmod(0)
    with pytest.raises(ConfigError, match=r"secret.txt.*cannot be read"):
        Corpus.load(DataConfig(path=str(path)))
