"""Whether an extracted answer equals the reference, and why it was judged so.

Two rules look at every pair. The string rule compares normalised text, and plain numbers as exact fractions. The symbolic rule (math-verify
on latex2sympy) compares values, in worker processes with a limit on time and memory: ``9^{9^{9^9}}`` ends its worker, not the run. An answer
is correct where either rule says so and nothing speaks against it (another unit, a tuple for a set). No rule accepts a part of a text.

Conventions:

* 1\\frac{1}{2} is one and a half. 1,234 is a number; 1, 234 is a list.
* A list is a set of solutions. A tuple has an order, and so has a list that is compared with a tuple.
* An answer may repeat an element; a repeated element of the reference counts twice.
* Values of different things (AB = 4, CD = 5) have an order.
* A missing unit, degree sign, currency or name ("x =") is accepted; a different one is not.
* An equation to be solved (7 = 11a + c) is no value.
* 50% equals 50 and 0.5.
* A decimal of six or more significant digits equals the fraction or root that it rounds or truncates. Two decimals are compared exactly.
* 1000,99 beside 1000.99 has a decimal comma.
* Digits in a base equal the same digits in the same base.
* "no solution" is the empty set.

docs/grading.md lists the public test suites that this was checked on.

Other graders may be added to the table in `kinds`.
"""

from mless.tasks.grading.base import AnswerGrader, Grade
from mless.tasks.grading.comparing import MAX_SYMBOLIC, NOTES
from mless.tasks.grading.grader import Grader
from mless.tasks.grading.kinds import CODE_GRADER, DEFAULT_GRADER, GRADERS
from mless.tasks.grading.reading import vote_of

__all__ = [
    "CODE_GRADER",
    "DEFAULT_GRADER",
    "GRADERS",
    "MAX_SYMBOLIC",
    "NOTES",
    "AnswerGrader",
    "Grade",
    "Grader",
    "vote_of",
]
