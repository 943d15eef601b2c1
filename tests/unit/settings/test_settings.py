"""What a settings file may say, and what it is told when it says something else."""

from pathlib import Path

import pytest

from controlplane.refusal import Code, Refused
from controlplane.settings import SettingsError, parse, read, spec_from_fields
from controlplane.spec import Idle

GOOD = """
# two devices, two models
[node]
pool_bytes = "2GiB"
devices = [
  { name = "cpu0", bytes = "1GiB" },
  { name = "cpu1", bytes = 1048576 },
]

[[model]]
name = "a"
source = "fake:a"
engine = "fake"
arguments = { load_ms = 100, kv_bytes = "1MiB" }
share = "1/2"
idle = { sleep = "2s", cold = "never" }
aliases = ["alpha"]
note = "random weights"

[[model]]
name = "b"
source = "hf:org/name@0123456789abcdef0123456789abcdef01234567"
"""


def test_a_whole_file_is_read() -> None:
    settings = parse(GOOD)
    assert settings.node.pool_bytes == 2 << 30
    assert parse('[node]\ndrain = "5s"').node.drain_ms == 5000
    assert [(d.name, d.size_bytes) for d in settings.node.devices] == [("cpu0", 1 << 30), ("cpu1", 1 << 20)]
    a, b = settings.models
    assert (a.name, a.engine, a.cells, a.aliases, a.note) == ("a", "fake", 4, ("alpha",), "random weights")
    assert a.arguments == {"load_ms": 100, "kv_bytes": 1 << 20}
    assert a.idle == Idle(sleep_ms=2000, cold_ms=None)
    assert (b.engine, b.cells, b.idle) == ("transformers", None, Idle())


def test_an_empty_file_leaves_everything_to_up() -> None:
    settings = parse("")
    assert settings.models == () and settings.node.devices == () and settings.node.pool_bytes is None


def test_digest_is_of_the_meaning() -> None:
    assert parse(GOOD).digest == parse(GOOD.replace("# two devices, two models", "# other words")).digest
    assert parse(GOOD).digest != parse(GOOD.replace('"2s"', '"3s"')).digest


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "says"),
    [
        ('name = "a"', 'nmae = "a"', 11, "nmae", "did you mean name?"),
        ('name = "a"', 'name = ".."', 11, "name", "not a model name"),
        ('name = "b"', 'name = "alpha"', 21, "name", 'taken by model "a"'),
        ('share = "1/2"', "share = 1.5", 15, "share", "1/4"),
        ('share = "1/2"', 'share = "1/3"', 15, "share", 'write "1/4" (less), "1/2" (which holds it)'),
        ('sleep = "2s"', "sleep = 2", 16, "idle.sleep", "not a duration"),
        ('sleep = "2s"', 'slep = "2s"', 16, "idle.slep", "did you mean sleep?"),
        ("load_ms = 100", "laod_ms = 100", 14, "arguments.laod_ms", "laod_ms"),
        ("load_ms = 100", 'load_ms = "x"', 14, "arguments.load_ms", "load_ms"),
        ('source = "fake:a"', 'source = "/a"', 12, "source", "fake"),
        ('source = "hf:org/name@0123456789abcdef0123456789abcdef01234567"', 'source = "hf:org/name"', 22, "source", "40 hex"),
        ('source = "hf:org/name@0123456789abcdef0123456789abcdef01234567"', "", 20, "source", "missing"),
        ('"2GiB"', '"2 gigs"', 4, "node.pool_bytes", "not a size"),
        ("bytes = 1048576", "bytes = 100", 5, "node.devices", "too few"),
        ('name = "cpu1"', 'name = "cpu0"', 5, "node.devices", "one name"),
        ('pool_bytes = "2GiB"', "gpus = 2", 4, "node.gpus", "nvidia-smi -L"),
        ('pool_bytes = "2GiB"', 'gpus = ["0"]', 4, "node.gpus", "nvidia-smi -L"),
        ('pool_bytes = "2GiB"', 'drain = "never"', 4, "node.drain", "needs an end"),
        ("[node]", "[nodes]", 3, "nodes", "did you mean node?"),
        ('pool_bytes = "2GiB"', 'pool_byte = "2GiB"', 4, "node.pool_byte", "did you mean pool_bytes?"),
        ('aliases = ["alpha"]', 'aliases = "alpha"', 17, "aliases", "list"),
        ('aliases = ["alpha"]', f"aliases = {[f'a{n}' for n in range(33)]}", 17, "aliases", "33 names; at most 32"),
    ],
)
def test_an_error_names_file_line_key_and_cure(old: str, new: str, line: int, key: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(GOOD.replace(old, new), "/etc/e.toml")
    assert (caught.value.path, caught.value.line, caught.value.key) == ("/etc/e.toml", line, key)
    assert says in str(caught.value) and str(caught.value).startswith(f"/etc/e.toml:{line}: ")


def test_a_share_may_be_whole_devices() -> None:
    (model, *_) = parse(GOOD.replace('share = "1/2"', "share = { gpus = 2 }")).models
    assert (model.gpus, model.cells) == (2, 8)


def test_what_is_of_gangs_alone_is_refused_to_a_model_on_one_device() -> None:
    loose = GOOD.replace("load_ms = 100", "gang_checkpoint = true")
    assert parse(loose.replace('share = "1/2"', "share = { gpus = 2 }")).models[0].arguments["gang_checkpoint"] is True
    with pytest.raises(SettingsError, match="of a model on several devices") as caught:
        parse(loose)
    assert caught.value.key == "arguments.gang_checkpoint"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('share = "1/2"', "share = { gpus = 3 }", "1, 2, 4, 8"),
        ('share = "1/2"', "share = { gpus = true }", "1, 2, 4, 8"),
        ('share = "1/2"', "share = { cpus = 2 }", "gpus = 2"),
    ],
)
def test_a_gang_of_another_size_is_refused(old: str, new: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        parse(GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [
        ('share = "1/2"', "priority = 0", 15, "priority"),
    ],
)
def test_what_a_later_version_brings_is_refused_by_name(old: str, new: str, line: int, key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(GOOD.replace(old, new))
    assert (caught.value.code, caught.value.key, caught.value.line) == (Code.NOT_AVAILABLE, key, line)
    assert "this version" in caught.value.message


def test_the_time_after_which_a_sleeper_is_saved_is_a_setting() -> None:
    (model, *_) = parse(GOOD.replace('cold = "never"', 'saved = "5m"')).models
    assert model.idle.saved_ms == 300_000


def test_the_time_after_which_a_sleeper_leaves_its_device_is_a_setting() -> None:
    (model, *_) = parse(GOOD.replace('cold = "never"', 'checkpoint = "30m", saved = "4h"')).models
    assert (model.idle.checkpoint_ms, model.idle.saved_ms) == (1_800_000, 14_400_000)


def test_images_have_a_quota_and_pins() -> None:
    node = parse('[images]\nquota = "20GiB"\npin = ["a", "cfg_0123", "a"]').node
    assert (node.image_quota_bytes, node.image_pins) == (20 << 30, ("a", "cfg_0123"))
    assert (parse("").node.image_quota_bytes, parse("").node.image_pins) == (0, ())


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ('quota = "1KiB"', "images.quota", "1.0 KiB hold no image; the least is 1.0 MiB"),
        ('quota = "much"', "images.quota", "much"),
        ('pin = "a"', "images.pin", "write a list"),
        ('pin = ["../a"]', "images.pin", "is not a model or a configuration"),
        ("pins = []", "images.pins", "did you mean pin?"),
    ],
)
def test_a_mistake_about_images_is_said_with_its_line(text: str, key: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(f"[node]\n\n[images]\n{text}\n")
    assert (caught.value.key, caught.value.line) == (key, 4)
    assert says in caught.value.message


@pytest.mark.parametrize("criu", ["criu", 3, "/a\nb"])
def test_criu_is_named_by_an_absolute_path(criu: object) -> None:
    with pytest.raises(SettingsError, match="absolute path"):
        parse(f"[node]\ncriu = {criu!r}".replace("'", '"'))
    assert parse('[node]\ncriu = "/opt/criu"').node.criu == "/opt/criu"


def test_idle_as_a_table_of_its_own_is_found() -> None:
    text = '[[model]]\nname = "a"\nsource = "fake:"\nengine = "fake"\n\n[model.idle]\ncold = 3\n'
    with pytest.raises(SettingsError) as caught:
        parse(text)
    assert (caught.value.line, caught.value.key) == (7, "idle.cold")


def test_broken_syntax_says_where(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text('[node]\npool_bytes = "1GiB\n')
    with pytest.raises(SettingsError) as caught:
        read(file)
    assert caught.value.line == 2


def test_an_unreadable_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"[node]\n# \xe9\n")
    with pytest.raises(SettingsError, match="UTF-8") as caught:
        read(tmp_path / "latin.toml")
    assert caught.value.line == 2


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/../b", "a/b", "a" * 101, "a" * 300, "modèle", "a\nb", "a\n", "a\x00", " a", "-a", "a.", 3, None]
)
def test_names_that_could_be_paths_or_tricks_are_refused(name: object) -> None:
    with pytest.raises(Refused) as caught:
        spec_from_fields({"name": name, "source": "fake:", "engine": "fake"})
    assert caught.value.code is Code.INVALID and caught.value.details["param"] == "name"


@pytest.mark.parametrize(
    "source", ["relative/dir", "/a/../etc", "hf:a/b@main", "hf:../b@" + "0" * 40, "http://x/y", "", "/a\x00b", 7]
)
def test_sources_that_are_not_pinned_or_absolute_are_refused(source: object) -> None:
    with pytest.raises(Refused) as caught:
        spec_from_fields({"name": "a", "source": source})
    assert caught.value.details["param"] == "source"


def test_a_rest_body_has_the_same_fields() -> None:
    spec = spec_from_fields({"name": "a", "source": "/models/a/", "share": 0.25, "idle": {"sleep": "1m"}})
    assert (spec.source, spec.cells, spec.idle.sleep_ms) == ("/models/a", 2, 60_000)


def test_the_pool_has_memory_that_lies_ready_and_helpers() -> None:
    node = parse('[node]\npool_bytes = "4GiB"\n[pool]\nready = "1GiB"\nhelpers = false').node
    assert (node.pool_ready_bytes, node.pool_helpers) == (1 << 30, False)
    assert (parse("").node.pool_ready_bytes, parse("").node.pool_helpers) == (None, True)
    assert parse("[pool]\nready = 0").node.pool_ready_bytes == 0


@pytest.mark.parametrize(("text", "share"), [("", None), ("beside_decoding = 0.1", 0.1), ("beside_decoding = 1", 1.0)])
def test_the_pool_is_told_how_fast_copies_are_beside_an_engine_that_decodes(text: str, share: float | None) -> None:
    assert parse(f"[pool]\n{text}").node.pool_beside_decoding == share


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ('ready = "much"', "pool.ready", "'much' is not a size"),
        ('ready = "5GiB"', "pool.ready", "5.0 GiB can't lie ready in a pool of 4.0 GiB"),
        ("helpers = 1", "pool.helpers", "1 is neither true nor false"),
        ('helpers = "no"', "pool.helpers", "'no' is neither"),
        ("beside_decoding = 0.09", "pool.beside_decoding", "0.09 is no part of a link's rate: write a number from 0.1 to 1"),
        ("beside_decoding = 1.5", "pool.beside_decoding", "1.5 is no part"),
        ("beside_decoding = nan", "pool.beside_decoding", "nan is no part"),
        ("beside_decoding = true", "pool.beside_decoding", "True is no part"),
        ('beside_decoding = "90%"', "pool.beside_decoding", "'90%' is no part"),
        ("read = 1", "pool.read", "did you mean ready?"),
    ],
)
def test_a_mistake_about_the_pool_is_said_with_its_line(text: str, key: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(f'[node]\npool_bytes = "4GiB"\n\n[pool]\n{text}\n', "here.toml")
    assert (caught.value.key, caught.value.line) == (key, 5) and says in str(caught.value)
    assert str(caught.value).startswith("here.toml:5: ")
