"""YAML that can be misread is refused, with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsekv.profiles.document import parse, parse_value


def messages(text: str) -> list[tuple[int, int, str, str]]:
    _, problems = parse(text, "p.yaml")
    return [(p.origin.line, p.origin.column, p.field, p.message) for p in problems]


def plain(text: str) -> object:
    tree, problems = parse(text, "p.yaml")
    assert tree is not None
    assert not problems
    return tree.plain()


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "the file is empty"),
        ("# only a comment\n", 1, 1, "the file is empty"),
        ("- a\n- b\n", 1, 1, "expected a map of sections at the top"),
        ("just text\n", 1, 1, "expected a map of sections at the top"),
        ("a:\n\tb: 1\n", 2, 1, "the line is indented with a tab; use spaces"),
        ("a: &x 1\nb: *x\n", 1, 4, "anchors and aliases are not supported; use `extends`"),
        ("a: 1\n---\nb: 2\n", 2, 1, "a profile is one document; a second one starts here"),
        ("a: !!python/object/apply:os.system ['true']\n", 1, 4, "tags are not supported: tag:yaml.org,2002:python/object/apply:os.system"),
        ("a: {? [1, 2] : 3}\n", 1, 7, "a key must be a plain word"),
    ],
)
def test_refused(text: str, line: int, column: int, message: str) -> None:
    [(found_line, found_column, _, found)] = messages(text)
    assert found.removeprefix("not valid YAML: ") == message
    assert (found_line, found_column) == (line, column)


def test_duplicate_keys_name_the_first_one() -> None:
    assert messages("kv:\n  dtype: int8\n  pool: 1GiB\n  dtype: int4\n") == [
        (4, 3, "kv.dtype", "duplicate key; first written in line 2"),
    ]


@pytest.mark.parametrize("opener", ["[", "a: {"])
def test_deep_nesting_is_refused_before_it_is_built(opener: str) -> None:
    [(_, _, _, message)] = messages("a: " + "[" * 100_000 if opener == "[" else "{a: " * 100_000)
    assert message == "nested deeper than 12 levels"


def test_a_huge_file_is_refused() -> None:
    [(_, _, _, message)] = messages("# " + "x" * (1 << 20))
    assert "larger than 1024 KiB" in message


def test_tags_run_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for tag in ("!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!mine"):
        tree, problems = parse(f"a: {tag} ['{marker}']\n", "p.yaml")
        assert tree is None
        assert problems
    assert not marker.exists()


def test_only_true_and_false_are_booleans_and_only_decimals_are_numbers() -> None:
    text = "a: [no, yes, on, off, y, TRUE, true, false]\nb: [010, 0x10, 1:30, 1e3, 1_000, 08, .5, ~]\n"
    assert plain(text) == {
        "a": ["no", "yes", "on", "off", "y", "TRUE", True, False],
        "b": ["010", "0x10", "1:30", 1000.0, 1000, "08", ".5", None],
    }


def test_control_characters_are_no_yaml() -> None:
    [(_, _, _, message)] = messages("a: \x00\n")
    assert message.startswith("not valid YAML")


def test_a_value_of_an_option_is_one_value() -> None:
    assert parse_value("[1, 2.5]", "--set").plain() == [1, 2.5]
    for text in ("a: b: c", "1\nother: 2", "[1", "&a 1"):
        with pytest.raises(ValueError, match="is not a YAML value"):
            parse_value(text, "--set")
