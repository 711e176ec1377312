"""Errors, settings, journal."""

from __future__ import annotations

import pickle
import sqlite3
from pathlib import Path

import pytest

from forebay.core import errors
from forebay.core.config import Settings
from forebay.core.errors import ConfigError, ForebayError, from_code
from forebay.core.journal import Journal


def all_errors(cls: type[ForebayError] = ForebayError) -> list[type[ForebayError]]:
    """Those of the tree; what a module has of its own beside them never leaves it."""
    public = [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
    return [cls, *(found for sub in public for found in all_errors(sub))]


def test_every_error_has_a_code_of_its_own_and_survives_the_wire():
    kinds = all_errors()
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        err = kind("what happened")
        again = from_code(err.code, err.message, err.hint)
        assert type(again) is kind and str(again) == str(err)
        assert str(pickle.loads(pickle.dumps(err))) == str(err)


def test_the_tree_in_the_docstring_is_the_tree():
    for kind in all_errors():
        assert f"{kind.__name__}" in (errors.__doc__ or "")


def test_an_unknown_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "forebay.toml"
    file.write_text("[stager]\ncapasity = '1GB'\n")
    monkeypatch.setenv("FOREBAY_CONFIG", str(file))
    with pytest.raises(ConfigError, match=r"forebay.toml.*unknown key `stager.capasity`"):
        Settings.load()


@pytest.mark.parametrize("text", ["[stager]\ncapacity = 'much'", "[stager]\ncapacity = -1", "not toml"])
def test_an_impossible_value_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "forebay.toml"
    file.write_text(text)
    monkeypatch.setenv("FOREBAY_CONFIG", str(file))
    with pytest.raises(ConfigError, match=r"forebay\.toml"):
        Settings.load()


def test_a_config_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREBAY_CONFIG", "/nowhere/forebay.toml")
    with pytest.raises(ConfigError, match="/nowhere"):
        Settings.load()


def test_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "forebay.toml"
    file.write_text("[stager]\ncapacity = '1GiB'\nconcurrency = 3\n")
    monkeypatch.setenv("FOREBAY_CONFIG", str(file))
    monkeypatch.setenv("FOREBAY_STAGER__CAPACITY", "2MiB")
    found = Settings.load()
    assert found.stager.capacity == 2 << 20 and type(found.stager.capacity) is int
    assert found.stager.concurrency == 3


def test_a_socket_path_that_the_kernel_cannot_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREBAY_HOME", "/" + "x" * 120)
    with pytest.raises(ConfigError, match="107 bytes"):
        _ = Settings.load().stager_socket


def test_journal_migrates_and_rolls_back(tmp_path: Path):
    first = "CREATE TABLE a (x INTEGER)"
    Journal(tmp_path / "j.db", [first], durable=True).close()
    journal = Journal(tmp_path / "j.db", [first, "ALTER TABLE a ADD y INTEGER"], durable=False)
    with pytest.raises(sqlite3.IntegrityError), journal.transact() as db:
        db.execute("INSERT INTO a VALUES (1, 2)")
        raise sqlite3.IntegrityError
    assert journal.rows("SELECT * FROM a") == []


def test_a_damaged_journal_is_put_aside(tmp_path: Path):
    (tmp_path / "j.db").write_bytes(b"this is no database, it is long enough to be one" * 50)
    journal = Journal(tmp_path / "j.db", ["CREATE TABLE a (x INTEGER)"], durable=True)
    assert journal.run("INSERT INTO a VALUES (1)") == 1
    assert len(list(tmp_path.glob("j.db.damaged-*"))) == 1
