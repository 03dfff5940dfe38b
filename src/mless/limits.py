"""Every limit on what comes from outside: its name, its value, and why it is there. docs/limits.md lists them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """The most of something that is taken."""

    name: str
    value: int
    unit: str
    why: str

    def __str__(self) -> str:
        return f"at most {f'{self.value:,} {self.unit}'.rstrip()} (limit {self.name}: {self.why})"


LIMITS: dict[str, Limit] = {}


def _limit(name: str, value: int, unit: str, why: str) -> Limit:
    LIMITS[name] = Limit(name, value, unit, why)
    return LIMITS[name]


# ---- files -----------------------------------------------------------------------------------------------------------

JSON_DEPTH = _limit("json-depth", 100, "levels", "real files have under 20, and Python gives up near 1,000")
NUMBER_DIGITS = _limit("number-digits", 400, "digits", "no float has more, and Python refuses 4,300")
CONFIG_BYTES = _limit("config-bytes", 64 << 20, "bytes", "config.json and the like have some thousand")
TOKENIZER_BYTES = _limit("tokenizer-bytes", 1 << 30, "bytes", "the largest published tokenizer.json has 35 million")
NORMALIZER_TEXT = _limit("normalizer-text", 10_000, "characters", "a normalizer adds or replaces a few characters")
HEADER_BYTES = _limit("header-bytes", 100_000_000, "bytes", "safetensors itself allows no longer header")
STUDY_BYTES = _limit("study-bytes", 16 << 20, "bytes", "a study file has some thousand")
DATA_BYTES = _limit("data-bytes", 4 << 30, "bytes", "all rows of a data file are held in memory")
DATA_ROWS = _limit("data-rows", 1_000_000, "rows", "every row becomes several prompts in memory")
QUESTION = _limit("question", 4_000_000, "characters", "about a million tokens, the longest context in use")

# ---- models ----------------------------------------------------------------------------------------------------------

LAYERS = _limit("layers", 1_000, "layers", "the deepest published decoders have under 200")
COUNT = _limit("config-count", 100_000, "", "counts of heads, experts and the like lie far below")
WIDTH = _limit("config-width", 100_000_000, "", "sizes in a config lie far below")
GGUF_VALUES = _limit("gguf-values", 10_000_000, "values", "the longest list is the vocabulary, some hundred thousand")
GGUF_ENTRIES = _limit("gguf-entries", 1_000_000, "entries", "real files have some thousand tensors and fields")

# ---- chat templates --------------------------------------------------------------------------------------------------

TEMPLATE_SECONDS = _limit("template-seconds", 5, "seconds", "a template is rendered in a thousandth of one")
TEMPLATE_MEMORY = _limit("template-memory", 2 << 30, "bytes", "a rendered conversation has some thousand")
TEMPLATE_TEXT = _limit("template-text", 16_000_000, "characters", "system text and question have 8 million at most")

# ---- counts of a study -----------------------------------------------------------------------------------------------

FILLER = _limit("filler", 1_000_000, "tokens", "no model takes a longer prompt")
FILLER_TEXT = _limit("filler-text", 100_000, "characters", "a filler is a short text that is repeated")
TEXT = _limit("text", 4_000_000, "characters", "about a million tokens, the longest context in use")
SAMPLES = _limit("samples", 10_000, "samples", "more say nothing new of an item")
ANSWERS = _limit("answers", 10_000_000, "answers", "items × conditions × samples are held in memory")
NEW_TOKENS = _limit("new-tokens", 1_000_000, "tokens", "no model takes a longer answer")
THREADS = _limit(
    "threads", 4_096, "threads", "no machine has more cores, and OpenMP crashes where it cannot start them"
)
ROWS_AT_ONCE = _limit("rows-at-once", 65_536, "rows", "they share one device's memory")
GPUS = _limit("gpus", 1_024, "GPUs", "a layer has fewer heads to divide among them")
CONNECTIONS = _limit("connections", 1_024, "connections", "each is an open socket")
SECONDS = _limit("timeout", 86_400, "seconds", "a day")
RETRIES = _limit("retries", 1_000, "retries", "each waits longer than the one before")
FLIPS = _limit("flips", 100_000_000, "flips", "more do not change a p-value that is printed")
CONDITIONS = _limit("conditions", 1_000, "conditions", "each one runs every item")
NAME = _limit("name", 200, "characters", "names become parts of file names")
SEED = _limit("seed", 2**63 - 1, "", "random number generators take 64 bits")
ITEMS = _limit("items", 10**9, "items", "no data set has more")
OTHER_ANSWERS = _limit("other-answers", 1_000, "answers", "each is scored after every prompt")
PLANNED_ITEMS = _limit("planned-items", 10_000_000, "items", "exact power of more takes over a minute")
# ---- result folders and logs of other programs ----------------------------------------------------------------------

MANIFEST_BYTES = _limit(
    "manifest-bytes", 1 << 29, "bytes", "study.json holds the items' ids and questions, some million"
)
TABLE_BYTES = _limit("table-bytes", 1 << 40, "bytes", "tables are read in parts, but not without end")
KEYED_ROWS = _limit("keyed-rows", 20_000_000, "rows", "beyond it keys are not compared: it would take minutes")
WHOLE_TABLE = _limit("whole-table", 1 << 28, "bytes", "a larger table is checked where it is read, not as a whole")
TABLE_ROWS = _limit("table-rows", 1 << 31, "rows", "items × conditions × layers × heads lie far below")
VALUES_PER_BYTE = _limit("values-per-byte", 4_096, "values a byte", "a table of numbers has about one; more is a bomb")
LOG_BYTES = _limit("log-bytes", 4 << 30, "bytes", "all answers of a log are held in memory")
LOG_ENTRIES = _limit("log-entries", 2_000_000, "entries", "an archive has one for each sample")
LOG_TEXT = _limit("log-text", 16_000_000, "characters", "one question or answer; contexts hold a million tokens")
