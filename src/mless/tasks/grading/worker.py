"""The worker: a guarded process that judges pairs, and in which math-verify compares two formulas."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import astuple
from fractions import Fraction
from typing import Any

from mless.errors import MlessError
from mless.guarded import Guarded
from mless.tasks.grading.comparing import Fault, judge
from mless.tasks.grading.reading import Reading, approximates, read


def started(limit: float, memory: int) -> Guarded:
    """The parent's end. It is asked (answer, reference) and answers with the fields of a `Grade`, or a fault."""
    return Guarded(__name__, limit, memory, _failed)


def _failed(cause: str) -> MlessError:
    way_out = (
        "pip install math-verify"
        if cause.startswith(("ModuleNotFoundError", "ImportError"))
        else "run it again where there is more memory, or less else to do; what is stored stays"
    )
    return MlessError(f"symbolic grading needs math-verify, but its worker failed: {cause}; {way_out}")


class _Crashed(Exception):
    """The symbolic rule gave up, and this process is not to be used again."""


def prepare() -> Callable[[str, str], dict[str, Any]]:
    """The worker's end."""
    import sympy.core.random as chance
    from math_verify.grader import verify

    def symbolic(given: str, reference: str) -> bool | Fault:
        verdict = _symbolic(verify, given, reference)
        if verdict == "crash":
            raise _Crashed
        return verdict

    def answer(given: str, reference: str) -> dict[str, Any]:
        chance.seed(0)
        try:
            return {"grade": astuple(judge(given, reference, symbolic))}
        except _Crashed:  # what earlier pairs left behind may have a part in it: the parent asks a fresh process
            return {"fault": "crash"}

    answer("x+1", "1+x")  # the parser builds its tables on first use; that time must not count for a pair
    return answer


def _symbolic(verify: Callable[..., bool], answer: str, reference: str) -> bool | Fault:
    try:
        gold = _parsed(reference)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  latex2sympy raises whatever it meets, RecursionError too
        return "reference"
    try:
        given = _parsed(answer)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001
        return "answer"
    reading = read(answer)
    if reading.digits and "%" not in reference and bool(getattr(gold, "is_number", False)):
        return _near(reading, gold)
    options: dict[str, Any] = {"float_rounding": 12, "allow_set_relation_comp": True, "timeout_seconds": None}
    try:
        return bool(verify(gold, given, **options, raise_on_error=True))
    except MemoryError:
        raise
    except RecursionError:
        return "crash"
    except Exception:  # noqa: BLE001  how math-verify meets two things that cannot be compared
        return False


def _parsed(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex
    from sympy import I, Symbol

    rules = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    latex = normalize_latex(text, rules)
    found: Any = latex2sympy(
        latex,
        is_real=not should_treat_as_complex(latex),
        convert_degrees=False,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False),
    )
    if found is None:
        raise ValueError("nothing read")
    # latex2sympy leaves i a symbol. As an index it stays one.
    if re.search(r"(?<![A-Za-z\\_])i(?![A-Za-z])", text) and not re.search(r"\\(?:sum|prod)|_\{?i", text):
        names = {
            symbol: I
            for symbol in getattr(found, "free_symbols", ())
            if isinstance(symbol, Symbol) and symbol.name == "i"
        }
        if names:
            found = found.subs(names)
    return found


def _near(answer: Reading, gold: Any) -> bool:
    """A decimal against an exact value such as a root: math-verify would round both at a fixed place, however small they are."""
    from sympy import Float, Rational

    assert answer.number is not None
    if bool(gold.has(Float)):
        return Fraction(str(gold)) == answer.number if gold.is_Float else False
    value = gold.doit().evalf(len(answer.text) + 20)
    if not value.is_Float and not value.is_Rational:
        return False
    exact: Any = Rational(value)
    return approximates(answer, Fraction(int(exact.p), int(exact.q)))
