"""Make the pages that only repeat what the code knows: docs/cli.md, docs/models.md, docs/api.md and docs/gallery.md.

python docs/make_pages.py           write them
python docs/make_pages.py --check   write nothing; exit code 1 if one is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from mless.cli import app
from mless.models import EMBEDDED, FAMILIES
from mless.study import StudySpec
from mless.study.spec import (
    AccuracyTable,
    CauseTable,
    ConditionTable,
    DoseTable,
    LikelihoodTable,
    MultiverseTable,
    PlaceboTable,
    TuneTable,
)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the tests run this file from elsewhere
import api_page  # noqa: E402
import gallery_page  # noqa: E402

_NOTE = "<!-- Made by docs/make_pages.py; change the code it reads and run `make docs`. -->"


def pages() -> dict[str, str]:
    """File name in docs/ → what it should hold."""
    return {
        "cli.md": _cli_page(),
        "models.md": _models_page(),
        "api.md": api_page.page(_NOTE),
        "gallery.md": gallery_page.page(_NOTE),
    }


# ---- the command -----------------------------------------------------------------------------------------------------


def _cli_page() -> str:
    root: Any = typer.main.get_command(app)
    blocks = ["# The command", _NOTE, root.help, root.epilog]
    blocks += ["`mless --help` and `mless COMMAND --help` print the same.", _table(_OPTION_HEAD, _options(root))]
    for name, command in root.commands.items():
        arguments = [_argument(p) for p in command.params if p.param_type_name == "argument"]
        words = ["mless", name, "[OPTIONS]", *(usage for _, usage, _ in arguments)]
        blocks += [f"## mless {name}", " ".join(command.help.split()), f"```\n{' '.join(words)}\n```"]
        if arguments:
            blocks.append(_table(("argument", "what it is"), [(f"`{label}`", about) for label, _, about in arguments]))
        blocks.append(_table(_OPTION_HEAD, _options(command)))
    blocks += [
        "## Study fields",
        "Where an option's default is empty, the study's own value stands. A study may leave out any field but its name, which is its "
        "file's unless given. These are the fields, for study files and for `--set`, with their defaults. A field whose default is empty is "
        "not set.",
        _table(("field", "default"), _study_fields()),
    ]
    return "\n\n".join(blocks) + "\n"


_OPTION_HEAD = ("option", "what it does", "default")


def _argument(parameter: Any) -> tuple[str, str, str]:
    """Its name, how it stands in the usage line, and what it is."""
    label = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    about = _cell(parameter.help)
    if not parameter.required and parameter.default is not None:
        about += f" Default: {_code(parameter.default)}."
    return label, label if parameter.required else f"[{label}]", about


def _options(command: Any) -> Iterable[tuple[str, str, str]]:
    for parameter in command.params:
        if parameter.param_type_name != "option" or parameter.hidden:
            continue
        names = ", ".join(_code(name) for name in [*parameter.opts, *parameter.secondary_opts])
        about = _cell(parameter.help)
        if parameter.multiple and "several times" not in about:
            about += " May be given several times."
        plain = parameter.default is None or parameter.default is False
        yield names, about, "" if plain else _code(parameter.default)


def _study_fields() -> Iterable[tuple[str, str]]:
    tables = {"condition": ("condition.NAME", ConditionTable()), "accuracy": ("accuracy", AccuracyTable())}
    tables |= {"likelihood": ("likelihood", LikelihoodTable()), "tune": ("tune", TuneTable())}
    tables |= {"placebo": ("placebo", PlaceboTable()), "dose": ("dose", DoseTable())}
    tables |= {"multiverse": ("multiverse", MultiverseTable()), "cause": ("cause", CauseTable())}
    for name, value in StudySpec(name="").model_dump(mode="json").items():
        if name in tables:
            under, table = tables[name]
            written = table.model_dump(mode="json")
            for key in type(table).model_fields:  # a dump leaves some out where they are not set
                inner = written.get(key)
                yield _code(f"{under}.{key}"), "" if inner is None else _code(json.dumps(inner))
        elif isinstance(value, dict) and value:
            yield from ((_code(f"{name}.{key}"), _code(json.dumps(inner))) for key, inner in value.items())
        elif name != "name":
            chosen = StudySpec.model_fields[name].description or ""
            yield _code(name), chosen if value in (None, {}) else _code(json.dumps(value))


# ---- models ----------------------------------------------------------------------------------------------------------


def _models_page() -> str:
    rows = [
        (
            family.label,
            _code(kind),
            "yes" if family.omit_first else "no",
            "yes" if family.bos else "no",
            _code(family.attention.module) if family.attention else "",
        )
        for kind, family in sorted(FAMILIES.items(), key=lambda pair: pair[1].label.lower())
    ]
    embedded = ", ".join(f"`{name}` ({label})" for name, (_, _, label) in EMBEDDED.items())
    blocks = [
        "# Models",
        _NOTE,
        f"`--model` takes a hub id, a folder with safetensors, a GGUF file or a folder with one, or an embedded model: {embedded}. "
        "`mless models` lists what is on this machine, `mless models NAME` describes one model before anything is run.",
        *_coverage(),
        "## Families with a row",
        "A row holds what cannot be read off the model itself. It is looked up by the config's `model_type`; for a model that "
        "sees or hears as well, by that of its text part.",
        _table(
            (
                "family",
                "`model_type`",
                "first token left out of curves",
                "trained with BOS",
                "attention outside the registry",
            ),
            rows,
        ),
        "*First token left out*: it is the attention sink, and its height would flatten the rest of the curve; `--keep-first` and "
        "`--omit-first` decide otherwise. *Trained with BOS*: a tokenizer that adds none is refused, with the way out. `no` in that column "
        "means only that the family by itself is no reason to refuse; the checkpoint's own settings may still be one. *Attention outside the "
        "registry*: the module of transformers that computes attention in code of its own, and that the row says how to reach.",
        "A family without a row works too, if its attention goes through transformers' attention registry and the "
        "[proofs](method.md#the-proofs) hold. They run on every model before anything is measured, with or without a row. "
        "What cannot be measured correctly is refused by name. [Adding a model](adding-a-model.md) says what each refusal means.",
        "## Families outside transformers",
        "A checkpoint that brings code of its own (`--trust-remote-code`) works if that code uses the registry; otherwise it is refused by name. InternLM is "
        "such a family: its published checkpoints bring their own attention. Converted to Llama's form they are `llama`, biases and all.",
        "## Quantised checkpoints",
        "A GGUF is dequantised once and kept. A checkpoint that torchao quantised (int8 weights) is read as it is, in the dtype it was saved "
        "for, where torchao is installed. For other methods, transformers has to load the model; then the proofs decide.",
    ]
    return "\n\n".join(blocks) + "\n"


def _coverage() -> Iterable[str]:
    """What the walk over every family found (tests/models/walking.py), from the file that it leaves."""
    found = json.loads((HERE / "coverage.json").read_text(encoding="utf-8"))
    families = found["families"]
    counted = [row for row in families if row["attention"] != "left out"]
    left_out = [row for row in families if row["attention"] == "left out"]
    works = [row for row in counted if row["attention"] == "works"]
    both = [row for row in works if row["activations"] == "works"]
    yield "## Every family of transformers"
    yield (
        f"transformers {found['transformers']} maps {len(families)} families to a causal language model. {len(left_out)} of them are no "
        f"softmax-attention decoders ([below](#left-out)). Of the other {len(counted)}, **{len(works)} work: "
        f"{100 * len(works) / len(counted):.1f} %**. In {len(both)} of these the activations can be read and changed as well, in some layers at the "
        "least; in the others they are refused by name."
    )
    yield (
        "*Works* was tested. A tiny random model of each family is saved, loaded as `--model` loads one, and has to pass the proofs. What every "
        "token receives in every head must be the column sums of the attention matrices that the model itself returns with eager attention. "
        "What is read as the activation must be what the layer goes on with. A family that could not be built would count as a miss. "
        "`tests/models/test_coverage.py` repeats the test; `tests/models/walking.py` makes the table again."
    )
    head = ("`model_type`", "class", "attention", "activations", "why")
    yield _table(head, [_verdict(row) for row in counted])
    yield (
        "*Not every layer attends*: a hybrid. Its attention layers are measured under the numbers they have in the model; asking for another layer is "
        "refused by name. *Mixture of experts*: a token's row of activations is spread over the experts that it was sent to."
    )
    yield "### Left out"
    yield "Not counted above, because there is no softmax attention over earlier tokens to measure, or not in the model by itself."
    yield _table(
        ("`model_type`", "class", "why"),
        [(_code(row["model_type"]), _code(row["model"]), _cell(row["why"])) for row in left_out],
    )


def _verdict(row: dict[str, str]) -> Sequence[str]:
    return (
        _code(row["model_type"]),
        _code(row["model"]),
        row["attention"],
        row["activations"],
        _cell(row["why"]),
    )


# ---- Markdown --------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


def _code(value: object) -> str:
    return f"`{value}`"


def main(arguments: Sequence[str]) -> int:
    if set(arguments) - {"--check"}:
        print(__doc__, file=sys.stderr)
        return 2
    stale = [
        name
        for name, text in pages().items()
        if not (HERE / name).exists() or (HERE / name).read_text(encoding="utf-8") != text
    ]
    for name in stale:
        if arguments:
            print(f"docs/{name} is out of date; run: make docs", file=sys.stderr)
        else:
            (HERE / name).write_text(pages()[name], encoding="utf-8")
            print(f"docs/{name} written")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
