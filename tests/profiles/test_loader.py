"""From text to a checked profile: every problem at once, with its place; `extends`; `--set`; origins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.profiles.document import Node, parse
from sparsekv.profiles.errors import SparsekvError
from sparsekv.profiles.loader import LoadedProfile, ProfileError, load_profile, overlay

Load = Callable[..., LoadedProfile]
Write = Callable[..., Path]
Problems = Callable[..., list[tuple[str, str, str]]]


def test_the_valid_profile_is_valid(load: Load) -> None:
    assert load().profile.kv.pool == 69 * 2**30


def test_all_problems_at_once_with_their_places(problems: Problems, valid: str) -> None:
    text = valid.replace("  dtype: int8", "  dtyp: int8").replace("69GiB", "69G")
    text = text.replace("gpus: 2", "gpus: lots").replace("  name: tiny\n", "")
    assert problems(text) == [
        ("4:3", "hardware.gpus", 'expected an integer, got "lots"'),
        ("8:1", "model.name", "required, and stated nowhere"),
        ("23:3", "kv.dtyp", "unknown key; did you mean `dtype`?"),
        ("24:3", "kv.pool", "unit `G` is ambiguous; write GB or GiB"),
    ]


def test_the_message_names_file_line_and_column(write: Write, valid: str) -> None:
    path = write(valid.replace("tensor: 2", "tensr: 2"))
    with pytest.raises(ProfileError) as caught:
        load_profile(str(path))
    assert str(caught.value).splitlines() == [
        "profile `mine` has a problem",
        f"  {path}:22:3  parallel.tensr  unknown key; did you mean `tensor`?",
    ]
    assert caught.value.hint == "`sparsekv profiles schema --field parallel` lists what may stand there"


@pytest.mark.parametrize(
    ("old", "new", "field", "message"),
    [
        ("dtype: int8", "dtype: INT8", "kv.dtype", 'expected one of bf16, int8, int4; got "INT8"; did you mean `int8`?'),
        ("dtype: int8", "dtype: 4", "kv.dtype", "expected one of bf16, int8, int4; got 4; did you mean `int4`?"),
        ("dtype: int8", "dtype: fp8", "kv.dtype", 'expected one of bf16, int8, int4; got "fp8"'),
        ("kv:\n", "kv_dtyp: int8\nkv:\n", "kv_dtyp", "unknown key; did you mean `kv.dtype`?"),
        ("kv:\n", "prefix_cache: false\nkv:\n", "prefix_cache", "unknown key; did you mean `scheduler.prefix_caching`?"),
        ("parallel:\n  tensor: 2", "parallel: 2", "parallel", "expected a map of keys, got 2"),
        ("gpus: 2", "gpus: -1", "hardware.gpus", "expected at least 0, got -1"),
        ("gpus: 2", "gpus: true", "hardware.gpus", "expected an integer, got True"),
        ("'8.6'", "8.6", "hardware.compute_capability", "expected text, got 8.6"),
        ("name: tiny", "name: ''", "model.name", 'expected text that is not empty, got ""'),
        ("  ram: 96GiB", "  ram: 96GiB\n  power_cap: 250", "hardware.power_cap", "the unit is missing; write for example 250W"),
        ("  ram: 96GiB", "  ram: 96GiB\n  numa_bind: maybe", "hardware.numa_bind", None),
        ("sketch:", "speculation:\n  method: off\nsketch:", "speculation.method", 'expected one of none, mtp, ngram; got "off"'),
    ],
)
def test_one_wrong_value(problems: Problems, old: str, new: str, field: str, message: str | None, valid: str) -> None:
    assert old in valid
    [(place, found_field, found)] = problems(valid.replace(old, new, 1))
    line = valid.replace(old, new, 1).splitlines()[int(place.split(":")[0]) - 1]
    assert found_field == field
    assert field.rpartition(".")[2] in line
    assert message is None or found == message


@pytest.mark.parametrize(("text", "value"), [("on", True), ("yes", True), ("true", True), ("off", False), ("no", False), ("false", False)])
def test_switches_mean_what_they_say(load: Load, text: str, value: bool, valid: str) -> None:
    assert load(valid + f"scheduler:\n  prefix_caching: {text}\n").profile.scheduler.prefix_caching is value


@pytest.mark.parametrize("key", ["api_key: sk-canary", "env_key: sk-canary"])
def test_an_unknown_key_does_not_show_its_value(problems: Problems, key: str, valid: str) -> None:
    assert "sk-canary" not in str(problems(valid + f"server:\n  {key}\n"))


def test_no_such_profile() -> None:
    with pytest.raises(SparsekvError, match="no profile named `dual3091`") as caught:
        load_profile("dual3091")
    assert caught.value.hint == "did you mean `dual3090`?"
    for reference in ("../x", "profiles/none.yaml", "none.yml"):
        with pytest.raises(SparsekvError, match="cannot read profile"):
            load_profile(reference)


def test_what_is_no_text_file(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, reason in ((f"{tmp_path}/", "not a file"), (f"{tmp_path}/binary.yaml", "not UTF-8 text"), ("/dev/zero", "not a file")):
        with pytest.raises(SparsekvError, match=reason):
            load_profile(name)


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path, valid: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + valid.replace("\n", "\r\n").encode())
    assert load_profile(str(path)).profile.model.name == "tiny"


# ---- extends


def test_maps_merge_lists_replace_and_null_takes_back(write: Write, valid: str) -> None:
    write(valid + "server:\n  port: 9000\nexpected:\n  source: computed\n  decode_tokens_per_second: [1, 2]\n", "base.yaml")
    child = write("extends: ./base.yaml\nkv: {pool: 40GiB}\nserver: {port: null}\nexpected: {decode_tokens_per_second: [3, 4]}\n")
    profile = load_profile(str(child)).profile
    assert (profile.kv.pool, profile.kv.dtype, profile.server.port) == (40 * 2**30, "int8", 8000)
    assert profile.expected is not None
    assert profile.expected.decode_tokens_per_second == [3, 4]


def test_later_parents_win(write: Write, valid: str) -> None:
    write(valid, "base.yaml")
    write("kv: {pool: 40GiB}\nserver: {port: 1}\n", "a.yaml")
    write("kv: {pool: 50GiB}\n", "b.yaml")
    child = write("extends: [./base.yaml, ./a.yaml, ./b.yaml]\n")
    loaded = load_profile(str(child))
    assert (loaded.profile.kv.pool, loaded.profile.server.port) == (50 * 2**30, 1)
    assert [Path(source).name for source in loaded.sources] == ["base.yaml", "a.yaml", "b.yaml", "mine.yaml"]


def test_origins_follow_each_value(write: Write, valid: str) -> None:
    base = write(valid, "base.yaml")
    child = write("extends: ./base.yaml\nkv:\n  pool: 40GiB\n")
    loaded = load_profile(str(child), ["kv.hot=1GiB", "scheduler.max_num_seqs=4"])
    assert loaded.origin("kv", "dtype") == f"{base}:24:3"
    assert loaded.origin("kv", "pool") == f"{child}:3:3"
    assert loaded.origin("kv", "hot") == "--set kv.hot"
    assert loaded.origin("scheduler", "max_num_batched_tokens") == "default"


def test_a_problem_of_a_parent_says_who_inherits_it(write: Write, valid: str) -> None:
    base = write(valid.replace("tensor: 2", "tensor: 0"), "base.yaml")
    child = write("extends: ./base.yaml\nserver: {prt: 1}\n")
    with pytest.raises(ProfileError) as caught:
        load_profile(str(child))
    own, inherited = caught.value.details
    assert own.startswith(f"{child}:2:10")
    assert "did you mean `port`?" in own
    assert inherited.startswith(f"{base}:22:3")
    assert inherited.endswith(f"(inherited by {child})")


def test_cycles_are_named_in_full(write: Write) -> None:
    a, b, c = (write(f"extends: ./{after}.yaml\n", f"{name}.yaml") for name, after in (("a", "b"), ("b", "c"), ("c", "a")))
    with pytest.raises(ProfileError) as caught:
        load_profile(str(a))
    [problem] = [p for p in caught.value.problems if p.field == "extends"]
    assert problem.message == f"goes in a circle: {a} -> {b} -> {c} -> {a}"
    assert problem.origin.source == str(c)


def test_a_file_named_like_a_shipped_one_may_extend_it(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write("extends: dual3090\nkv: {pool: 40GiB}\nmodel: {path: here}\n", "profiles/dual3090.yaml")
    monkeypatch.chdir(tmp_path)
    loaded = load_profile("profiles/dual3090.yaml")
    assert loaded.origin("kv", "pool") == "./profiles/dual3090.yaml:2:6"
    assert loaded.origin("kv", "dtype").startswith("profiles/dual3090.yaml:")
    assert loaded.profile.model.path == str(tmp_path / "profiles" / "here")


@pytest.mark.parametrize("value", ["", "3", "[a, 1]", "{a: b}"])
def test_extends_takes_names(problems: Problems, value: str) -> None:
    assert ("1:1", "extends", "expected the name or path of a profile, or a list of them") in problems(f"extends: {value}\n")


def test_a_missing_parent_has_a_place(problems: Problems) -> None:
    assert ("1:1", "extends", "no profile named `nowhere`") in problems("extends: nowhere\n")


# ---- --set


def test_overrides_are_yaml_and_checked(load: Load, problems: Problems, valid: str) -> None:
    profile = load(valid, "kv.dtype=int4", "kv.pool=34GiB", "scheduler.prefix_caching=off", "vllm.seed=7", "env.NCCL_DEBUG=WARN").profile
    assert (profile.kv.dtype, profile.scheduler.prefix_caching) == ("int4", False)
    assert (profile.vllm, profile.env) == ({"seed": 7}, {"NCCL_DEBUG": "WARN"})
    assert problems(valid, "kv.pool=34", "kv.dtyp=int4", "kv", "=1", "kv.hot=[") == [
        ("--set ", "", "expected `section.key=value`"),
        ("--set kv", "", "expected `section.key=value`"),
        ("--set kv.dtyp", "kv.dtyp", "unknown key; did you mean `dtype`?"),
        ("--set kv.hot", "kv.hot", "`[` is not a YAML value: not valid YAML: expected the node content, but found '<stream end>'"),
        ("--set kv.pool", "kv.pool", "the unit is missing; write for example 64GiB"),
    ]


def test_an_empty_override_takes_back(load: Load, valid: str) -> None:
    assert load(valid + "server: {port: 9000}\n", "server.port=").profile.server.port == 8000


# ---- paths


def test_paths_start_at_their_file(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, valid: str) -> None:
    base = write(valid, "machines/base.yaml")
    child = write("extends: ./machines/base.yaml\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_profile(str(child)).profile.model.path == str(base.parent / "models/tiny")
    assert load_profile(str(child), ["model.path=x y"]).profile.model.path == str(tmp_path / "elsewhere" / "x y")


@pytest.mark.parametrize(
    ("text", "path"), [("~/models", "{home}/models"), ("$HOME/m", "{home}/m"), ("${HOME}/a b", "{home}/a b"), ("/abs/x", "/abs/x")]
)
def test_paths_are_expanded(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, path: str, valid: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(valid.replace("models/tiny", text)).profile.model.path == path.format(home=tmp_path)


def test_an_unset_variable_is_a_problem(problems: Problems, valid: str) -> None:
    [problem] = problems(valid.replace("models/tiny", "$NOT_SET_ANYWHERE/x"))
    assert problem == ("9:3", "model.path", "environment variable NOT_SET_ANYWHERE is not set")


# ---- properties

SECTIONS = {"kv": ("dtype", "pool", "headroom"), "server": ("host", "port"), "env": ("A", "B")}
TREES = st.fixed_dictionaries(
    {},
    optional={
        section: st.fixed_dictionaries({}, optional={key: st.sampled_from(["x", 1, None, [1, 2]]) for key in keys})
        for section, keys in SECTIONS.items()
    },
)


def node(tree: dict[str, object], source: str) -> Node:
    parsed, problems = parse(yaml.safe_dump(tree, default_flow_style=True), source)
    assert parsed is not None
    assert not problems
    return parsed


@given(TREES, TREES, TREES)
def test_it_does_not_matter_which_files_merge_first(a: dict[str, object], b: dict[str, object], c: dict[str, object]) -> None:
    first, second, third = node(a, "a"), node(b, "b"), node(c, "c")
    left, right = overlay(overlay(first, second), third), overlay(first, overlay(second, third))
    assert left is not None
    assert left == right
    assert {str(leaf.origin).partition(":")[0] for path, leaf in left.walk() if len(path) == 2} <= {"a", "b", "c"}
