"""Embed the lines of a text with a real sentence model, all-MiniLM-L6-v2, whose attention is onchip's.

    python examples/embed.py notes.txt --out notes.npz
    python examples/embed.py notes.txt --query "when does the train leave"

The model calls PyTorch's scaled_dot_product_attention, and inside `onchip.replace_sdpa()` that is onchip's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import Tensor

import onchip
from onchip.bench.demo.sentences import ModelMissing, load_model
from onchip.cli.options import read_device

MOST_TOKENS = 256
"""What the model was trained with, by its own sentence_bert_config.json; the rest of a longer line is left out."""
FORMATS = (".npz", ".safetensors")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file that is not blank, and its number from 1 on."""

    number: int
    text: str


@app.command()
def main(
    file: Annotated[Path, typer.Argument(help="Text in UTF-8; every line that is not blank gets an embedding.")],
    out: Annotated[
        Path | None, typer.Option(help=f"Write the embeddings and the lines' numbers here: {' or '.join(FORMATS)}.")
    ] = None,
    query: Annotated[list[str] | None, typer.Option(help="Print the lines nearest to this; repeatable.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Lines to print for a query.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Lines that the model reads at once.")] = 32,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda or cuda:<index>.")] = "cpu",
    own_attention: Annotated[
        bool, typer.Option("--own-attention", help="Leave PyTorch's attention in the model, to compare.")
    ] = False,
) -> None:
    """Embed the lines of a text, and find those that are nearest to a query."""
    if out is None and not query:
        raise typer.BadParameter("nothing would be kept or printed: give --out, --query or both")
    if out is not None and out.suffix not in FORMATS:
        raise typer.BadParameter(f"--out ends in {' or '.join(FORMATS)}: got {out}")
    where = read_device(device)
    lines = read_lines(file)
    try:
        tokenizer, model = load_model()
    except ModelMissing as missing:
        print(missing, file=sys.stderr)
        raise typer.Exit(1) from None
    model.to(where)
    console = Console(highlight=False)

    def shown(batches: Sequence[list[int]]) -> Iterator[list[int]]:
        yield from track(batches, f"{len(lines)} lines", console=console, transient=True)

    with nullcontext() if own_attention else onchip.replace_sdpa():
        embeddings = embed(tokenizer, model, [line.text for line in lines], batch, shown)
        queries = embed(tokenizer, model, query, batch) if query else None
    if out is not None:
        write(out, embeddings, lines)
        console.print(f"{len(lines)} embeddings of {embeddings.shape[1]} numbers: {out}", markup=False)
    if query and queries is not None:
        for text, similarities in zip(query, queries @ embeddings.T, strict=True):
            print_nearest(console, text, similarities, lines, top)


def read_lines(file: Path) -> list[Line]:
    """The lines that are not blank.

    Raises:
        BadParameter: the file cannot be read, is not UTF-8, or has no such line.
    """
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read as UTF-8: {error}") from None
    # not splitlines(), which knows other ends of lines than an editor's line numbers do
    lines = [Line(number, text.strip()) for number, text in enumerate(content.split("\n"), start=1) if text.strip()]
    if not lines:
        raise typer.BadParameter(f"{file} has no line that is not blank")
    return lines


def embed(
    tokenizer: Any,
    model: Any,
    texts: Sequence[str],
    batch: int,
    shown: Callable[[Sequence[list[int]]], Iterator[list[int]]] = iter,
) -> Tensor:
    """Unit vectors, float32 (texts, width), on the CPU: the mean of the last hidden states over a text's own tokens.

    Texts of like length go together, so that little is padded: attention sees the padding as a mask.

    Args:
        batch: texts in a batch.
        shown: gives the batches one by one, each as indices into `texts`; a progress bar, for one.
    """
    tokens = tokenizer(list(texts), truncation=True, max_length=MOST_TOKENS)["input_ids"]
    order = sorted(range(len(texts)), key=lambda index: len(tokens[index]))
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    found = torch.empty(len(texts), model.config.hidden_size)
    with torch.inference_mode():
        for indices in shown(batches):
            inputs = tokenizer.pad({"input_ids": [tokens[index] for index in indices]}, return_tensors="pt")
            inputs = inputs.to(model.device)
            hidden = model(**inputs).last_hidden_state  # (batch, length, width)
            keep = inputs["attention_mask"].unsqueeze(-1)
            means = (hidden * keep).sum(1) / keep.sum(1)
            found[indices] = torch.nn.functional.normalize(means).float().cpu()
    return found


def write(path: Path, embeddings: Tensor, lines: Sequence[Line]) -> None:
    """Write `embeddings`, float32 (lines, width), and `lines`, their numbers as int64, by these names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = torch.tensor([line.number for line in lines])
    if path.suffix == ".npz":
        import numpy

        numpy.savez(path, embeddings=embeddings.numpy(), lines=numbers.numpy())
    else:
        from safetensors.torch import save_file

        save_file({"embeddings": embeddings, "lines": numbers}, path)


def print_nearest(console: Console, query: str, similarities: Tensor, lines: Sequence[Line], top: int) -> None:
    """Print the lines whose embeddings have the largest cosine with that of the query."""
    table = Table("cosine", "line", "text", title=Text(query), title_justify="left")
    values, indices = similarities.topk(min(top, len(lines)))
    for value, index in zip(values.tolist(), indices.tolist(), strict=True):
        table.add_row(f"{value:.3f}", str(lines[index].number), Text(lines[index].text))
    console.print(table)


if __name__ == "__main__":
    app()
