"""A study is a TOML file; what is typed changes its fields, and a slip of the pen is named with the nearest right word."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mless.errors import BadStudy
from mless.stats import Margins
from mless.study import available_studies, load_study
from mless.study.conditions import conditions_of
from mless.study.identity import default_folder, digest, identity_of, rerun_command
from mless.study.showing import check_figure, figure_spec, for_models, published_models, single_layer
from mless.study.spec import StudySpec
from mless.study.tuning.choosing import settings_to_try
from mless.values import ARM_PRESETS, Condition, Item, arm_settings


def refusal(name: str = "quick", *sets: str, **changes: Any) -> str:
    with pytest.raises(BadStudy) as caught:
        conditions_of(load_study(name, changes, sets))
    message = str(caught.value)
    assert message.isprintable(), message
    return message


@pytest.fixture
def own(tmp_path: Path) -> Any:
    def written(text: str, name: str = "own.toml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return written


# ---- what comes with the package -------------------------------------------------------------------------------------------


def test_every_figure_has_its_study() -> None:
    found = available_studies()
    assert next(iter(found)) == "quick"
    wanted = {"fig2", "fig9", "fig10", "fig11", *(f"fig{n}" for n in range(13, 21)), "map", "retained", "mass"}
    assert set(found) >= {"quick"} | wanted
    for name in wanted:
        spec = found[name]
        assert figure_spec(spec).id == name
        assert spec.title
        assert {"none", "random", *figure_spec(spec).conditions} <= {c.name for c in conditions_of(spec)}
    assert [name for name in wanted if name[:3] == "fig" and "random" in figure_spec(found[name]).conditions] == [
        "fig11"
    ]


def test_quick_is_what_the_issue_says() -> None:
    spec = load_study("quick")
    assert (spec.model, spec.data, spec.prompt, spec.layers, spec.heads) == ("smollm2", "bundled", "raw", "all", "all")
    assert conditions_of(spec) == [
        Condition("none", "none"),
        Condition("mless", "repeat", " /", 55),
        Condition("mful", "repeat", " he", 55),
        Condition("random", "text", None, 55),
    ]


# ---- --set -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("length=30", "length", 30),
        ("data=arithmetic:2:9", "data", "arithmetic:2:9"),
        ('data="bundled"', "data", "bundled"),
        ("filler= #", "filler", " #"),
        ('filler=" #"', "filler", " #"),
        ("filler=0", "filler", "0"),
        ("layers=1", "layers", "1"),
        ("layers=1-3,7", "layers", "1-3,7"),
        ("heads=2", "heads", "2"),
        ("limit=4", "limit", 4),
        ('conditions=["none", "random"]', "conditions", ["none", "random"]),
        ("conditions=none, random", "conditions", ["none", "random"]),
        ("conditions=random", "conditions", ["random"]),
        ("prompt=chat", "prompt", "chat"),
        ("question_field=true", "question_field", "true"),
        ("system=", "system", ""),
        ("system=a = b", "system", "a = b"),
    ],
)
def test_set_reads_toml_and_bare_words(text: str, field: str, value: object) -> None:
    assert getattr(load_study("quick", {}, [text]), field) == value


def test_set_reaches_into_tables_and_wins_over_options() -> None:
    spec = load_study("quick", {"length": 10}, ["length=30", "margins.drop=0.9", "margins.same=[0.8, 1.2]"])
    assert spec.length == 30
    assert spec.margins_of() == Margins(0.9, 1.05, (0.8, 1.2))
    spec = load_study("fig15", {"figure.heads": "3"}, ["figure.heads=2"])
    assert spec.figure is not None
    assert (spec.figure.heads, len(spec.figure.panels)) == ("2", 3)  # the rest of the table stays
    spec = load_study("fig15", {}, ["figure.conditions=none, mful"])
    assert figure_spec(spec).conditions == ("none", "mful")
    spec = load_study("quick", {}, ["condition.hash.filler= #", "condition.hash.length=7", "conditions=none,hash"])
    assert conditions_of(spec)[1] == Condition("hash", "repeat", " #", 7)


@pytest.mark.parametrize("text", ["length", "=3", " = 3"])
def test_set_needs_a_key_and_a_value(text: str) -> None:
    assert refusal("quick", text) == f"--set takes key=value, as --set length=30; got {text!r}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lenght=3", "has no field 'lenght' (did you mean 'length'?); its fields are: name, title, model"),
        ("zzz=3", "has no field 'zzz'; its fields are: name, title"),
        ("margins.drp=0.9", "no field 'margins.drp' (did you mean 'margins.drop'?); its fields are: margins.drop, "),
        ("condition.x.fillr=a", "no field 'condition.x.fillr' (did you mean 'condition.x.filler'?)"),
        ("length=long", "--set length: input should be a valid integer"),
        ("length=0", "--set length: input should be greater than or equal to 1, got 0"),
        ("limit=0", "--set limit: input should be greater than or equal to 1, got 0"),
        ("seed=-1", "--set seed: input should be greater than or equal to 0, got -1"),
        ("flips=99", "--set flips: input should be greater than or equal to 100000, got 99"),
        ("placement=middle", "'before-system', 'before-question', 'end', 'before-answer' or 'anywhere', got 'middle'"),
        ("prompt=tchat", "input should be 'auto', 'chat', 'user' or 'raw', got 'tchat'"),
        ("dtype=int8", "input should be 'auto', 'float32', 'bfloat16' or 'float16', got 'int8'"),
        ("conditions=7", "--set conditions: input should be a valid list, got 7"),
        ("figure.heads=2", "study 'quick' is for no figure; `mless studies` shows which are"),
    ],
)
def test_faults_name_the_field_and_the_way_out(text: str, why: str) -> None:
    assert why in refusal("quick", text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("margins.drop=1.5", "margin drop must lie above 0 and not above 1"),
        ("margins.rise=0.5", "margin rise must be finite and at least 1"),
        ("margins.rise=inf", "--set margins.rise: input should be a finite number"),
        ("margins.same=[1.2, 1.3]", "margin same must be two finite shares around 1"),
    ],
)
def test_margins_out_of_range(text: str, why: str) -> None:
    with pytest.raises(BadStudy, match=why):
        load_study("quick", {}, [text]).margins_of()


# ---- conditions --------------------------------------------------------------------------------------------------------------


def test_unknown_studies_and_conditions() -> None:
    message = refusal("figg9")
    assert message.startswith("no study 'figg9' (did you mean 'fig9'?); there are: quick, ")
    assert message.endswith(", or give a .toml file")
    assert "no study '../quick' (did you mean 'quick'?)" in refusal("../quick")
    assert "no study file 'nowhere.toml'; `mless studies` lists" in refusal("nowhere.toml")
    assert refusal(conditions="none,mles").startswith(
        "no condition 'mles' (did you mean 'mless'?); there are: none, mless, mful, random, random-tokens, position-only, arm, "
    )


def test_none_is_always_measured_and_comes_first() -> None:
    for asked in ("mless", "mless,none", "mless,none,mless"):
        names = [c.name for c in conditions_of(load_study("quick", {"conditions": asked}))]
        assert names == ["none", "mless"]
    assert [c.name for c in conditions_of(load_study("quick", {"conditions": []}))] == ["none"]


def test_a_study_of_ones_own(own: Any) -> None:
    path = own(
        'title = "Mine"\nlayers = 2\nlength = 9\nconditions = ["none", "hash", "late"]\n'
        '[condition.hash]\nfiller = " #"\n[condition.late]\nkind = "text"\nlength = 4\nplacement = "end"\n'
    )
    spec = load_study(path)
    assert (spec.name, spec.title, spec.layers) == ("own", "Mine", "2")
    assert conditions_of(spec)[1:] == [
        Condition("hash", "repeat", " #", 9),
        Condition("late", "text", None, 4, "end"),
    ]
    changed = conditions_of(load_study(path, {}, ["condition.hash.length=3"]))[1]
    assert changed == Condition("hash", "repeat", " #", 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("layers = ", "is no valid TOML: "),
        ("lenght = 3", "has no field 'lenght' (did you mean 'length'?)"),
        ('conditions = ["none", "x"]\n[condition.x]\nlength = 3', "condition 'x' repeats a filler, but none is given"),
        (
            'conditions = ["x"]\n[condition.x]\nkind = "noun"',
            "condition 'x': no condition kind 'noun' (did you mean 'none'?); there are: none, repeat, text, tokens, shift",
        ),
        ('conditions = ["x"]\n[condition.x]\nkind = "none"\nlength = 3', "inserts nothing"),
        ('[condition.none]\nfiller = " /"', "[condition.none] cannot change it; give yours another name"),
        ('measures = "tune"', "measures = 'tune': write the table [tune] instead"),
        ('measures = "accuracy"', "write the table [accuracy] instead"),
        ('measures = "mine"\n[options]\nsince = 2020-01-01', "[options] are kept in study.json"),
        ('conditions = ["a b"]\n[condition."a b"]\nfiller = " /"', "condition name 'a b' becomes part of file names"),
    ],
)
def test_faults_of_a_study_of_ones_own(own: Any, text: str, why: str) -> None:
    assert why in refusal(own(text))


def test_a_study_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(b'title = "\xe9"')
    assert "line 1: byte 0xe9 is not UTF-8; save the file as UTF-8" in refusal(str(tmp_path / "s.toml"))
    (tmp_path / "d.toml").mkdir()
    assert "is a folder, not a file" in refusal(str(tmp_path / "d.toml"))


# ---- figures -----------------------------------------------------------------------------------------------------------------


def test_a_figure_the_model_cannot_show_is_refused_before_the_run() -> None:
    with pytest.raises(
        BadStudy, match=r"fig15 shows head 17, but this model's heads are 1 to 9 .*--heads most-shifted:3"
    ):
        check_figure(load_study("fig15"), 30, 9)
    check_figure(load_study("fig15"), 30, 28)
    with pytest.raises(BadStudy, match="no head 10: this model's heads are 1 to 9"):
        check_figure(load_study("fig15", {"figure.heads": "10"}), 30, 9)
    check_figure(load_study("fig15", {"figure.heads": "most-shifted:3"}), 30, 9)
    with pytest.raises(BadStudy, match="fig9 shows layer 2, but this model's layers are 1 to 1; choose with --layers"):
        check_figure(load_study("fig9", {"figure.heads": "1"}), 1, 9)
    with pytest.raises(BadStudy, match="no layer 31: this model's layers are 1 to 30"):
        check_figure(load_study("fig9", {"figure.layers": "31"}), 30, 32)
    with pytest.raises(BadStudy, match="fig15 shows layer 1, but would measure 2; choose with --layers"):
        check_figure(load_study("fig15", {"layers": "2", "figure.heads": "1"}), 30, 9)
    with pytest.raises(BadStudy, match="fig15 shows head 1, but would store 2–3; choose with --heads"):
        check_figure(load_study("fig15", {"heads": "2-3", "figure.heads": "1"}), 30, 9)


def test_figures_without_panels_are_checked_too() -> None:
    for name in ("attention", "mass"):
        check_figure(load_study(name, {"layers": "2", "figure.layers": "2"}), 30, 9)
        with pytest.raises(BadStudy, match="no layer 31: this model's layers are 1 to 30"):
            check_figure(load_study(name, {"layers": "31", "figure.layers": "31"}), 30, 9)
        with pytest.raises(BadStudy, match=f"{name} shows layer 2, but would measure 1; choose with --layers"):
            check_figure(load_study(name, {"figure.layers": "2"}), 30, 9)
    with pytest.raises(BadStudy, match="no head 10: this model's heads are 1 to 9"):
        check_figure(load_study("attention", {"figure.heads": "10"}), 30, 9)


def test_conditions_a_figure_shows_must_be_run() -> None:
    for name in ("map", "retained", "mass"):  # they show those of their conditions that are run
        check_figure(load_study(name, {}, ["conditions=none,mless"]), 30, 9)
    with pytest.raises(
        BadStudy, match=r"fig10 shows 'mful', but would run none, mless only; .*figure\.conditions=none,mless"
    ):
        check_figure(load_study("fig10", {"figure.heads": "1"}, ["conditions=none,mless"]), 30, 9)
    both = ["conditions=none,mless", "figure.conditions=none,mless"]
    check_figure(load_study("fig10", {"figure.heads": "1"}, both), 30, 9)
    with pytest.raises(BadStudy, match=r"no condition 'mles' \(did you mean 'mless'\?\)"):
        check_figure(load_study("mass", {}, ["figure.conditions=none,mles"]), 30, 9)
    for name in ("map", "attention", "fig11"):
        with pytest.raises(BadStudy, match=f"{name} has nothing to show: .* none with filler is run"):
            check_figure(load_study(name, {"figure.heads": "most-shifted:1"}, ["figure.conditions=none"]), 30, 9)
    check_figure(load_study("mass", {}, ["conditions=none"]), 30, 9)


def test_an_item_that_the_data_lacks_is_refused_before_the_run() -> None:
    spec = load_study("fig15", {"limit": 3})
    spec.check_item("3")
    with pytest.raises(BadStudy, match="no item '4' in bundled: give a number from 1 to 3, or an id such as"):
        spec.check_item("4")


def test_layers_asked_for_replace_the_published_ones() -> None:
    panels = figure_spec(load_study("fig9", {"figure.layers": "2-3"})).panels
    assert [(p.layer, p.head) for p in panels] == [(2, 22), (3, 22)]
    panels = figure_spec(load_study("fig15", {"figure.layers": "4"})).panels
    assert [(p.layer, p.head) for p in panels] == [(4, 17), (4, 26), (4, 28)]
    with pytest.raises(BadStudy, match="fig15 shows one layer, got --layers 1-2; give one number"):
        figure_spec(load_study("fig15", {"figure.layers": "1-2"}))
    with pytest.raises(BadStudy, match="name them, as --layers 1-3"):
        figure_spec(load_study("fig9", {"figure.layers": "all"}))
    assert single_layer(load_study("mass", {"figure.layers": "3"})) == 3
    with pytest.raises(BadStudy, match="mass shows one layer, got --layers 1-3; give one number"):
        single_layer(load_study("mass", {"figure.layers": "1-3"}))
    assert single_layer(load_study("attention", {"figure.layers": "2"})) == 2
    assert single_layer(load_study("attention", {"layers": "3-5"})) == 3
    assert [single_layer(load_study(name)) for name in ("mass", "map", "retained", "fig15")] == [1, None, None, None]


def test_each_model_gets_the_panels_it_stands_for() -> None:
    spec = load_study("fig2")
    published = published_models(spec)
    assert [m.rsplit("/")[-1] for m in published] == ["Qwen2.5-Math-7B", "Llama-3.1-8B-Instruct", "gemma-3-4b-it"]

    def heads(*models: str) -> list[int]:
        found = for_models(spec, models)
        assert [one.model for one in found] == list(models)
        return [figure_spec(one).panels[0].head for one in found]

    assert heads("mine-1", "mine-2", "mine-3") == [22, 27, 3]
    assert heads(*reversed(published)) == [3, 27, 22]  # a name counts before a position
    assert heads("/models/gemma-3-4b-it/", "mine", "other") == [3, 22, 27]  # the others take what is left, in order
    assert heads("mine", published[0], "other") == [27, 22, 3]
    assert heads(published[2]) == [3]
    assert heads("mine", "llama3.1-8b-instruct") == [22, 27]


# ---- what a study must not do --------------------------------------------------------------------------------------------------


def test_no_study_lets_a_models_own_code_run(own: Any) -> None:
    way_out = "has no field 'trust_remote_code': only the --trust-remote-code flag on the command line can do that"
    assert way_out in refusal(own("trust_remote_code = true"))
    assert way_out in refusal("quick", "trust_remote_code=true")
    assert way_out in refusal("quick", trust_remote_code=False)
    assert "trust_remote_code" not in StudySpec.model_fields


# ---- folders and commands ----------------------------------------------------------------------------------------------------


def test_changed_fields_get_a_folder_of_their_own(own: Any) -> None:
    plain = default_folder(load_study("quick"), "SmolLM2 135M")
    assert plain == Path("results/quick-SmolLM2-135M")
    shorter, same = load_study("quick", {"limit": 4}), load_study("quick", {"limit": 4, "title": "other"})
    assert default_folder(shorter, "m") == default_folder(same, "m") != default_folder(load_study("quick"), "m")
    assert default_folder(load_study("quick", {"limit": 5}), "m") != default_folder(shorter, "m")
    path = own("length = 9")
    assert default_folder(load_study(path), "m") == Path("results/own-m")
    assert default_folder(load_study(path, {"limit": 4}), "m") != Path("results/own-m")


fields = st.fixed_dictionaries(
    {},
    optional={
        "filler": st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6),
        "system": st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12),
        "layers": st.sampled_from(["1", "1-3,7", "all"]),
        "limit": st.integers(1, 99),
        "conditions": st.lists(st.sampled_from(["none", "mless", "mful", "random"]), max_size=3),
        "margins": st.fixed_dictionaries({"drop": st.floats(0.5, 1.0)}),
        "condition": st.just({"hash": {"filler": " #", "length": 3}}),
        "seed": st.integers(0, 2**40),
    },
)


@settings(deadline=None, max_examples=60)
@given(fields)
def test_the_command_to_run_it_again_gives_the_same_study(changes: dict[str, Any]) -> None:
    spec = load_study("quick", changes)
    words = rerun_command(spec, Path("out"))
    assert shlex.split(shlex.join(words)) == words
    assert words[:5] == ["mless", "run", "quick", "--out", "out"]
    sets = words[6::2]
    assert words[5::2] == ["--set"] * len(sets)
    assert load_study("quick", {}, sets) == spec


def test_the_command_writes_a_quoted_control_character_too() -> None:
    spec = load_study("quick", {"filler": '"\x7f"'})
    assert load_study("quick", {}, rerun_command(spec, Path("out"))[6::2]) == spec


def test_the_command_writes_cuts_and_patches_too() -> None:
    cut = [
        {"queries": "answer", "keys": "filler", "to": "sink"},
        {"queries": "original", "keys": "filler", "layers": "2-"},
    ]
    changed = {
        "nobody": {"filler": " /", "cut": cut},
        "put-in": {
            "filler": "",
            "patch": [{"from": "mless", "part": "attention-output", "layers": "1", "at": "question"}],
        },
    }
    spec = load_study("likelihood", {"conditions": ["none", "mless", *changed], "condition": changed})
    words = rerun_command(spec, Path("out"))
    assert load_study("likelihood", {}, words[6::2]) == spec


def test_the_command_names_a_study_of_ones_own_by_its_file(own: Any) -> None:
    path = own("length = 9")
    assert rerun_command(load_study(path, {"limit": 2}), Path("o")) == [
        "mless", "run", path, "--out", "o", "--set", "limit=2",
    ]  # fmt: skip


def test_a_spec_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_study("quick").length = 3
    assert isinstance(load_study("quick"), StudySpec)


def test_a_condition_with_another_text_alone_inserts_nothing() -> None:
    changes = {
        "condition.polite.system": "Please.",
        "condition.twice.question": "{question} {question}",
        "conditions": "polite,twice",
    }
    found = {one.name: one for one in conditions_of(load_study("accuracy", changes))}
    assert (found["polite"].kind, found["polite"].system) == ("none", "Please.")
    assert found["twice"].kind == "none"


@pytest.mark.parametrize("k", ["1,2,x", "", "1.5"])
def test_k_must_be_whole_numbers(k: str) -> None:
    with pytest.raises(BadStudy, match="expected whole numbers, as 1,4,8"):
        load_study("accuracy", {"accuracy.k": k, "accuracy.samples": 4, "accuracy.temperature": 0.5})


def test_one_k_is_enough() -> None:
    changes = {"accuracy.k": 4, "accuracy.samples": 4, "accuracy.temperature": 0.5}
    assert load_study("accuracy", changes).accuracy.k == [4]


# ---- items by id, and [tune] -----------------------------------------------------------------------------------------


def test_only_takes_items_by_their_ids_in_the_datas_order():
    spec = load_study("accuracy", {"data": "arithmetic:1:9", "only": "arithmetic-1-0007,arithmetic-1-0002"})
    assert [item.id for item in spec.load_items()[1]] == ["arithmetic-1-0002", "arithmetic-1-0007"]
    with pytest.raises(
        BadStudy, match=r"only: no item '7' in arithmetic:1:9 \(1 such\); ids are expected, as 'arithmetic-1-0001'"
    ):
        load_study("accuracy", {"data": "arithmetic:1:9", "only": "7"}).load_items()


def test_a_tuning_grid_is_typed_with_commas_or_given_as_a_list():
    tune = load_study(
        "tune", {"tune.c": "0.1, 0.2", "tune.layers": "1,2-3,1+5"}, ["tune.p1=90", "tune.fraction=0.1,0.25"]
    ).tune
    assert tune is not None
    assert (tune.c, tune.p1, tune.fraction) == ([0.1, 0.2], [90.0], [0.1, 0.25])
    assert tune.layers == ["1", "2-3", "1+5"]
    with pytest.raises(BadStudy, match=r"field 'tune.c': expected numbers, as 0\.05,0\.13, got 'much'"):
        load_study("tune", {"tune.c": "much"})
    with pytest.raises(BadStudy, match=r"no field 'tune.dev_shar' \(did you mean 'tune.dev_share'\?\)"):
        load_study("tune", {"tune.dev_shar": 0.5})


@pytest.mark.parametrize("name", ["table2", "table3", "table6", "table7", "table8"])
def test_the_tables_with_arm_can_show_what_they_run(name: str):
    spec = load_study(name)
    check_figure(spec)
    assert any(condition.arm is not None for condition in conditions_of(spec))


@pytest.mark.parametrize("name", ["tune", "fig12", "table9"])
def test_the_tuning_studies_have_a_grid_and_a_figure(name: str):
    spec = load_study(name)
    check_figure(spec)
    assert single_layer(spec) is None
    assert len(settings_to_try(spec)) > 5
    assert figure_spec(spec).kind in ("sensitivity", "table")


# ---- ARM ---------------------------------------------------------------------------------------------------------------


def test_a_preset_is_a_whole_of_its_own():
    published = ARM_PRESETS["gemma-3-4b-it"]
    changes = {"conditions": "none,mine", "condition.mine.arm.preset": "gemma-3-4b-it"}
    mine = conditions_of(load_study("quick", changes | {"arm.p1": 99.0, "arm.p_max": 0.5, "arm.c": 0.2}))[1]
    assert mine.arm == published
    arm = load_study("tune", {"arm.preset": "google/gemma-3-4b-it"}).arm.settings()
    assert arm == published
    own = conditions_of(load_study("quick", {"conditions": "none,arm", "arm.preset": "gemma-3-4b-it", "arm.c": 0.3}))
    assert own[1].arm == replace(published, c=0.3, fraction=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arm.c": -1}, "c must be 0 or more, got -1"),
        ({"arm.fraction": 1.0}, "fraction must lie between 0 and 1"),
        ({"arm.c": 0.1, "arm.fraction": 0.2}, "c = 0.1 and fraction = 0.2; give one"),
        ({"arm.p1": 0}, "p1 is a percentile above 0"),
        ({"arm.p_min": 0.4}, "0 < p_min ≤ p_max < 1"),
        ({"arm.preset": "gpt-2"}, "no preset 'gpt-2'.*qwen2.5-math-7b"),
        ({"arm.layers": [1, 1]}, "named twice"),
    ],
)
def test_bad_parameters_of_arm_are_told_before_anything_runs(changes, words):
    with pytest.raises(BadStudy, match=words):
        conditions_of(load_study("quick", {"conditions": "none,arm"} | changes))


def test_arm_takes_layers_as_they_are_written_and_nothing_unknown():
    assert arm_settings(layers="1-3").layers == (1, 2, 3)
    assert arm_settings(layers="1+5").layers == (1, 5)
    assert arm_settings(layers=2).layers == (2,)
    for bad, words in (
        ({"layers": [1.5]}, "whole numbers from 1, got 1.5"),
        ({"c": "0.1"}, "c must be a number, got '0.1'"),
        ({"q": 1}, "ARM takes no 'q'"),
    ):
        with pytest.raises(BadStudy, match=words):
            arm_settings(**bad)


def test_an_affine_study_takes_no_batches():
    with pytest.raises(BadStudy, match="takes no batch_size; got 4"):
        load_study("affine", {"batch_size": 4})


def test_bounds_that_cross_over_leave_nothing_to_try():
    with pytest.raises(BadStudy, match=r"every p_min \(0.5\) is above every p_max \(0.1\)"):
        settings_to_try(load_study("tune", {"tune.p_min": [0.5], "tune.p_max": [0.1]}))


# ---- counts, before any work ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("study", "text", "why"),
    [
        ("quick", "length=10000000", "--set length: expected at most 1,000,000 tokens (limit filler: "),
        ("quick", "length=1000000000000000000000000000000", "expected at most 1,000,000 tokens"),
        ("quick", f"length={'9' * 5000}", "--set length: "),
        ("quick", "limit=1000000000000000000", "expected at most 1,000,000,000 items"),
        ("quick", "batch_size=1000000000000000000", "expected at most 65,536 rows"),
        ("quick", "seed=1000000000000000000000000000000", "(limit seed: "),
        ("quick", "flips=1000000000000000000", "expected at most 100,000,000 flips"),
        ("quick", "margins.drop=nan", "input should be a finite number"),
        ("accuracy", "accuracy.samples=1000000000", "expected at most 10,000 samples (limit samples: "),
        ("accuracy", "accuracy.max_new_tokens=1000000000000000000", "expected at most 1,000,000 tokens"),
        ("accuracy", "accuracy.timeout=1e300", "expected at most 86,400 seconds"),
        ("accuracy", "accuracy.temperature=inf", "input should be a finite number"),
        ("accuracy", "accuracy.concurrency=1000000000", "expected at most 1,024 connections"),
    ],
)
def test_counts_beyond_their_limits(study: str, text: str, why: str) -> None:
    assert why in refusal(study, text)


@pytest.mark.parametrize("content", ["a = " + "[" * 5000 + "]" * 5000, "length = " + "9" * 5000, "length = 1979-99-99"])
def test_study_files_that_are_no_toml(tmp_path: Path, content: str) -> None:
    (tmp_path / "s.toml").write_text(content)
    assert str(tmp_path / "s.toml") in refusal(str(tmp_path / "s.toml"))


def test_a_study_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "s.toml").mkdir()
    assert "is a folder, not a file" in refusal(str(tmp_path / "s.toml"))
    assert "no study 'a\\x00b'" in refusal("a\0b")
    assert "no study file" in refusal("a\0b.toml")


def test_text_that_no_file_takes_is_refused() -> None:
    for changes in ({"title": "\ud800"}, {"condition": {"x": {"filler": "\udfff"}}}, {"data": "d\udcff.jsonl"}):
        with pytest.raises(BadStudy, match="is half a character"):
            load_study("quick", changes)


def test_solutions_and_choices_leave_stored_folders_as_they_are() -> None:
    """A folder from before items had them is continued: its identity holds id, question and answer of each item, and no solution_field."""
    spec = load_study("quick", {"solution_field": "work"})
    found = identity_of(spec, None, "weights", [Item("1", "q", "a", None, "worked out", ("a", "b"), 0)])
    assert found == identity_of(load_study("quick"), None, "weights", [Item("1", "q", "a")])
    assert found["data"] == digest([["1", "q", "a"]])
    assert "solution_field" not in found


def test_a_misspelt_field_of_a_cut_is_named_before_the_one_that_it_leaves_out() -> None:
    cut = [{"querys": "answer", "keys": "filler"}]
    with pytest.raises(
        BadStudy, match=r"no field 'condition\.c\.cut\.0\.querys' \(did you mean 'condition\.c\.cut\.0\.queries'\?\)"
    ):
        load_study("likelihood", {"conditions": ["none", "c"], "condition": {"c": {"filler": " /", "cut": cut}}})
