"""What agents may see of a folder (G5), and that nothing leads out of it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sparsekv.bench.swarm import repository as module
from sparsekv.bench.swarm.repository import Repository, Unreadable, read_text, scan
from sparsekv.bench.swarm.tools import Tools
from sparsekv.profiles.errors import SparsekvError

SECRET = "canary-outside"


@pytest.fixture
def odd(tmp_path: Path) -> Repository:
    """Every odd thing that folders hold."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text(SECRET)
    root = tmp_path / "code"
    (root / "deep").mkdir(parents=True)
    (root / "plain.py").write_text("def plain():\n    return 1\n")
    (root / "picture.py").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)))
    (root / "cp1252.py").write_bytes("# caf\xe9 \u20ac 5\nx = 1\n".encode("cp1252"))
    (root / "utf16.py").write_text("y = 'tö'\n", encoding="utf-16")
    (root / "marked.py").write_bytes(b"\xef\xbb\xbfz = 3\n")
    (root / "nul.py").write_bytes(b"a = 1\0\0b = 2\n")
    (root / "noise.py").write_bytes(bytes((i * 7919) % 251 + 1 for i in range(5000)))
    (root / "app.min.js").write_text("var a=1;" * 250_000)
    with (root / "huge.log").open("wb") as file:
        file.truncate(300 << 20)
    (root / "empty.py").write_text("")
    (root / "key.pem").write_text("-----BEGIN PRIVATE KEY-----\n")
    (root / ".env").write_text("TOKEN=x\n")
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (root / "node_modules").mkdir()
    (root / "node_modules" / "left.js").write_text("left()\n")
    (root / "pointer.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (root / "name with\nnewline.py").write_text("n = 1\n")
    (root / "🦊.py").write_text("fox = 1\n")
    with open(os.fsencode(root) + b"/bad\xff.py", "wb") as file:
        file.write(b"bad = 1\n")
    (root / "loop").symlink_to(root)
    (root / "deep" / "up").symlink_to("..")
    (root / "broken.py").symlink_to(root / "nowhere")
    (root / "secret_link.py").symlink_to(outside / "secret.py")
    (root / "folder_link").symlink_to(outside)
    os.mkfifo(root / "pipe.py")
    listener = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(root)  # the path of a socket is short
    listener.bind("socket.py")
    os.chdir(here)
    listener.close()
    return scan(root)


def test_reads_text_of_any_encoding(odd: Repository) -> None:
    assert odd.files["plain.py"] == ["def plain():", "    return 1"]
    assert odd.files["cp1252.py"][0] == "# café € 5"
    assert odd.files["utf16.py"] == ["y = 'tö'"]
    assert odd.files["marked.py"] == ["z = 3"]
    assert odd.files["🦊.py"] == ["fox = 1"]
    assert odd.files["name with\\nnewline.py"] == ["n = 1"]
    assert odd.files["bad\\xff.py"] == ["bad = 1"]
    assert list(odd.files) == sorted(odd.files)


def test_says_why_something_is_not_shown(odd: Repository) -> None:
    assert {name: odd.skipped[name] for name in sorted(odd.skipped)} == {
        ".env": "hidden",
        ".git": "hidden",
        "app.min.js": "larger than 1 MiB",
        "broken.py": "a link",
        "deep/up": "a link",
        "empty.py": "empty",
        "folder_link": "a link",
        "huge.log": "larger than 1 MiB",
        "key.pem": "looks like a secret",
        "loop": "a link",
        "node_modules": "a folder of built or fetched files",
        "noise.py": "binary",
        "nul.py": "binary",
        "picture.py": "binary",
        "pipe.py": "not a regular file",
        "pointer.bin": "a git-lfs pointer",
        "secret_link.py": "a link",
        "socket.py": "not a regular file",
    }
    assert sum(odd.reasons.values()) == len(odd.skipped)


def test_a_long_line_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("x" * 5000)
    (tmp_path / "b.js").write_text("var b\n")
    found = scan(tmp_path)
    assert list(found.files) == ["b.js"]
    assert found.skipped["a.js"].startswith("minified")


def test_deep_folders_and_limits_of_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path.joinpath(*["d"] * 20)
    deep.mkdir(parents=True)
    (deep / "x.py").write_text("x = 1\n")
    assert list(scan(tmp_path).files) == ["/".join(["d"] * 20 + ["x.py"])]
    monkeypatch.setattr(module, "MAX_DEPTH", 5)
    (tmp_path / "y.py").write_text("y = 1\n")
    assert list(scan(tmp_path).files) == ["y.py"]
    (tmp_path / "z.py").write_text("z = 1\n")
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    assert "over the limit of entries or time of the scan" in scan(tmp_path).reasons


def test_all_files_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).write_text("0123456789\n" * 10)
    monkeypatch.setattr(module, "MAX_TOTAL_BYTES", 150)
    found = scan(tmp_path)
    assert list(found.files) == ["a", "b"]
    assert found.skipped["c"] == "over the limit of all files together"


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    with pytest.raises(SparsekvError, match=r"no text file to read.*1 binary"):
        scan(tmp_path)
    with pytest.raises(SparsekvError, match="No such file"):
        scan(tmp_path / "missing")
    with pytest.raises(SparsekvError, match="not a folder"):
        scan(tmp_path / "a.bin")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").write_text("b = 1\n")
    (tmp_path / "b.py").chmod(0)
    assert scan(tmp_path).skipped == {"b.py": "no permission"}


def test_a_file_swapped_for_a_link_after_the_listing(tmp_path: Path) -> None:
    root = tmp_path / "code"
    root.mkdir()
    (tmp_path / "secret.py").write_text(SECRET)
    (root / "a.py").symlink_to(tmp_path / "secret.py")
    with pytest.raises(Unreadable):
        read_text(str(root / "a.py"), root)
    # Nor through a folder that became a link.
    (root / "sub").symlink_to(tmp_path)
    with pytest.raises(Unreadable, match="outside"):
        read_text(str(root / "sub" / "secret.py"), root)


@pytest.mark.parametrize(
    "path",
    [
        "../outside/secret.py", "deep/../../outside/secret.py", "/etc/passwd", "secret_link.py", "folder_link/secret.py", "key.pem", ".env",
        "./../outside/secret.py", "..\\outside\\secret.py", "plain.py/../../outside/secret.py", "file:///etc/passwd",
        "~/.ssh/id_rsa", "\0", "",
    ],
)  # fmt: skip
def test_no_tool_leads_out(odd: Repository, path: str) -> None:
    tools = Tools(odd)
    assert tools.read_file(path).startswith("error:")
    assert path == "" or tools.list_files(path).startswith("error:")
    assert tools.search(SECRET).startswith("no line contains")


def test_a_link_to_the_folder_itself_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("a = 1\n")
    (tmp_path / "link").symlink_to(tmp_path / "code")
    assert list(scan(tmp_path / "link").files) == ["a.py"]
