"""The example GPT: shapes, causality, tracing, and the stages cut by hand.

Its corpus: what is in it, what is held out, and that batches depend on (seed, step) alone.
"""

import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from support.inside import (
    GPT,
    Corpus,
    GPTConfig,
    bits_per_byte,
    gpt_stages,
    is_held_out,
    load_corpus,
    loss_fn,
    sample,
    standard_library_files,
)
from torch import nn

SMALL = GPTConfig(vocabulary=256, length=12, layers=3, width=16, heads=2)


def make(config: GPTConfig) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return GPT(config)


def tokens(batch: int, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(2))


def test_the_default_has_about_five_million_parameters_and_starts_at_chance() -> None:
    model = make(GPTConfig())
    assert 4.5e6 < sum(p.numel() for p in model.parameters()) < 5.5e6
    x = tokens(2, 128)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.3)


def test_heads_follow_the_width() -> None:
    heads = {320: 5, 256: 4, 64: 1, 10: 1, 200: 2, 1024: 16}
    assert {width: GPTConfig(width=width).num_heads for width in heads} == heads


def test_a_logit_depends_on_no_later_token() -> None:
    model = make(SMALL)
    x = tokens(1)
    changed = x.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(x), model(changed)
    assert before.shape == (1, 12, 256)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=0)
    assert (after[:, 7:] != before[:, 7:]).any(dim=-1).all()


@pytest.mark.parametrize(("num_stages", "blocks"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1])])
def test_stages_cut_by_hand_compute_what_the_whole_computes(num_stages: int, blocks: list[int]) -> None:
    whole = make(SMALL)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        stages = gpt_stages(SMALL, num_stages)
    assert [sum(type(m).__name__ == "Block" for m in stage) for stage in stages] == blocks
    torch.testing.assert_close(nn.Sequential(*stages)(tokens(2)), whole(tokens(2)), rtol=0, atol=0)


def test_sampling_repeats_itself_and_leaves_torch_and_the_model_as_they_were() -> None:
    model = make(SMALL)
    state = torch.get_rng_state()
    first = sample(model, b"def ", num_bytes=20, length=12, seed=3)
    assert first == sample(model, b"def ", num_bytes=20, length=12, seed=3)
    assert first != sample(model, b"def ", num_bytes=20, length=12, seed=4)
    assert len(first) == 20
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: GPTConfig(layers=0), "layers=0: expected at least 1"),
        (lambda: GPTConfig(width=10, heads=4), "expected a width that the heads divide, such as 12"),
        (lambda: GPTConfig(dropout=1.0), "dropout=1.0: expected a probability"),
        (lambda: gpt_stages(SMALL, 4), "num_stages=4 for 3 layers: expected 1 to 3"),
        (lambda: gpt_stages(GPTConfig(layers=2, tied=True), 2), "expected tied=False"),
        (lambda: sample(nn.Identity(), b"", num_bytes=1, length=1), "prompt is empty"),
        (lambda: sample(nn.Identity(), b"a", num_bytes=1, length=1, temperature=0), "above 0"),
    ],
)
def test_mistakes_are_named(make_it: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()  # type: ignore[operator]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_the_standard_library_is_several_megabytes_of_text_and_a_twentieth_is_held_out(corpus: Corpus) -> None:
    total = len(corpus.train) + len(corpus.validation)
    assert total > 5_000_000
    assert 0.02 < len(corpus.validation) / total < 0.10
    shares = np.bincount(corpus.train, minlength=256) / len(corpus.train)
    entropy = -sum(share * math.log2(share) for share in shares if share > 0)
    assert 4.4 < entropy < 5.0  # what a model that knows the frequencies alone reaches
    assert corpus.sha256 == load_corpus().sha256


def test_packages_tests_and_idlelib_are_left_out() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    parts = {part for path in standard_library_files(root) for part in path.relative_to(root).parts[:-1]}
    assert not parts & {"site-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"}
    assert {"asyncio", "email", "json"} <= parts


def test_held_out_files_never_change() -> None:
    # A golden list: another hash would put training text of earlier runs into the validation text.
    names = ["abc.py", "ast.py", "asyncio/events.py", "json/decoder.py", "os.py", "typing.py"]
    names += [f"m{number}.py" for number in range(60)]
    assert [name for name in names if is_held_out(name)] == HELD_OUT


HELD_OUT = ["m34.py"]


def test_a_batch_depends_on_seed_and_step_alone_and_targets_are_the_next_bytes(corpus: Corpus) -> None:
    batch = corpus.batch(seed=1, step=5, batch_size=3, length=16)
    again = corpus.batch(seed=1, step=5, batch_size=3, length=16)
    assert batch.tokens.shape == batch.targets.shape == (3, 16)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.tokens, again.tokens)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    others = [corpus.batch(seed=s, step=t, batch_size=3, length=16) for s, t in ((1, 6), (2, 5))]
    assert not any(torch.equal(batch.tokens, other.tokens) for other in others)


def test_the_users_own_files(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_bytes(bytes(range(100)) * 10)
    corpus = load_corpus([path])
    assert corpus.train.tobytes() == path.read_bytes()[:950]
    assert corpus.validation.tobytes() == path.read_bytes()[950:]
    assert str(path) in corpus.source
    path.write_bytes(bytes(1000))
    assert load_corpus([path]).sha256 != corpus.sha256


def test_validation_windows_are_fixed_and_cover_the_text_from_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_bytes(bytes(range(200)) * 10)  # 100 bytes of validation: 100..199
    corpus = load_corpus([path])
    batches = corpus.validation_batches(num_batches=2, batch_size=3, length=9)
    assert [b.tokens.shape for b in batches] == [(3, 9), (3, 9)]
    assert batches[0].tokens[0, 0] == 100
    assert batches[-1].targets[-1, -1] == 199
    short = corpus.validation_batches(num_batches=2, batch_size=3, length=99)  # one possible window: repeated
    assert [b.tokens.shape for b in short] == [(3, 99), (3, 99)]


def test_texts_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the text file '.*nowhere\.txt': No such file"):
        load_corpus([tmp_path / "nowhere.txt"])
    with pytest.raises(ValueError, match="Is a directory"):
        load_corpus([tmp_path])
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 400)
    with pytest.raises(ValueError, match=r"short\.txt: 20 bytes of validation text.*more than 32 bytes"):
        load_corpus([path]).check_length(32)
    with pytest.raises(ValueError, match="too short"):
        load_corpus([path]).batch(seed=0, step=0, batch_size=1, length=500)


def test_the_loss_of_even_chances_is_eight_bits_a_byte() -> None:
    loss = loss_fn(torch.zeros(2, 5, 256), torch.randint(0, 256, (2, 5)))
    assert bits_per_byte(loss.item()) == pytest.approx(8.0)
