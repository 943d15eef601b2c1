"""Root's clusters live apart from their data directories, and are told apart from those that nobody owns any more."""

import json
import os
import pwd
import shutil
from pathlib import Path

import pytest

from compose.embedded.cluster import Cluster, orphans
from compose.embedded.refusal import ServerRefusal


def test_a_cluster_without_its_data_directory_is_an_orphan(tmp_path: Path) -> None:
    homes = tmp_path / "homes"
    directories = [tmp_path / name for name in ("kept", "gone", "anew")]
    for directory in directories:
        Cluster(directory, homes / f"postgres-{directory.name}", None).prepare()
    assert orphans(homes) == []
    shutil.rmtree(directories[1])
    mark = directories[2] / "postgres.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "word": "another"}))
    assert [path.name for path in orphans(homes)] == ["postgres-anew", "postgres-gone"]
    (homes / "postgres-gone" / "owner.json").write_text("{half")
    assert [path.name for path in orphans(homes)] == ["postgres-anew"], "what can't be read is left alone"


def test_root_without_an_account_that_postgres_can_run_as_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> pwd.struct_passwd:
        raise KeyError(name)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", unknown)
    with pytest.raises(ServerRefusal) as refused:
        Cluster.of(tmp_path)
    assert refused.value.code == "no_account"
    assert "postgres nor nobody" in refused.value.message and "--postgres" in refused.value.cure
