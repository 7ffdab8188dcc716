import fcntl
import json
from pathlib import Path

import numpy as np
import pytest

from openbook.core.types import Passage
from openbook.errors import InvalidConfig, InvalidSnapshot
from openbook.index.building.build import build_snapshot
from openbook.index.disk.root import LOCK, PUBLISHED, Published, Root

FIRST = Published(sequence=7, current="a", former="z")


def test_what_is_on_record_after_each_step() -> None:
    prepared = FIRST.after_prepare("b")
    assert prepared == Published(sequence=7, current="a", former="z", prepared="b")
    assert prepared.after_discard("b") == FIRST
    published = prepared.after_publish("b", 8)
    assert published == Published(sequence=8, current="b", former="a")
    assert prepared.after_prepare("a") == FIRST  # back to it before the other one was published
    assert published.after_prepare("a").after_publish("a", 9) == Published(sequence=9, current="a", former="b")


def test_steps_asked_twice_or_late_change_nothing() -> None:
    published = FIRST.after_prepare("b").after_publish("b", 8)
    assert published.after_publish("b", 8) == published
    assert published.after_prepare("b") == published
    assert published.after_discard("b") == published
    assert FIRST.after_prepare("b").after_discard("z") == FIRST.after_prepare("b")  # which is not the prepared one
    assert published.after_publish("a", 7) == published  # of a publication that is over
    assert published.after_publish("b", 12) == published.model_copy(update={"sequence": 12})


def test_publishing_another_than_the_prepared_one_leaves_it_prepared() -> None:
    assert FIRST.after_prepare("c").after_publish("b", 8).prepared == "c"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    passages = [Passage(i, "d", "", "") for i in range(3)]
    for name in ("inside", "elsewhere/outside"):
        folder = tmp_path / ("root/" if name == "inside" else "") / name
        build_snapshot(passages, np.ones((3, 2), np.float32), folder, 1, "Flat", "e", "f")
    return Root.create(tmp_path / "root", tmp_path / "root" / "inside")


def test_a_root_on_disk(root: Root, tmp_path: Path) -> None:
    assert json.loads((tmp_path / "root" / PUBLISHED).read_text()) == {
        "format_version": 1,
        "sequence": 1,
        "current": "inside",
        "former": None,
        "prepared": None,
    }
    outside = tmp_path / "elsewhere" / "outside"
    name = root.name_of(outside)
    root.update(lambda published: published.after_prepare(name).after_publish(name, 2))
    again = Root(tmp_path / "root")
    assert again.folder_of(again.read().current) == outside
    assert again.folder_of(str(again.read().former)) == tmp_path / "root" / "inside"
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == [".published.lock", "inside", PUBLISHED]


def test_a_record_is_changed_by_one_at_a_time(root: Root, tmp_path: Path) -> None:
    def change(published: Published) -> Published:
        with (tmp_path / "root" / LOCK).open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return published.after_prepare("b")

    root.update(change)
    assert root.read().prepared == "b"


def test_a_folder_that_was_reached_by_a_link_is_recorded_as_what_it_is(root: Root, tmp_path: Path) -> None:
    """A link may lead elsewhere by the time that a server starts again."""
    (tmp_path / "link").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "latest").symlink_to("inside")
    assert root.name_of(tmp_path / "link" / "latest") == "inside"


def test_a_root_is_made_once_and_of_a_snapshot(root: Root, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="exists"):
        Root.create(tmp_path / "root", tmp_path / "root" / "inside")
    with pytest.raises(InvalidSnapshot, match="not a snapshot"):
        Root.create(tmp_path / "other", tmp_path)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ('{"sequence": 0, "current": "a"}', "sequence: Input should be greater"),
        ("{}", "sequence: .*required"),
    ],
)
def test_a_damaged_record_is_named(root: Root, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "root" / PUBLISHED
    path.write_text(text)
    with pytest.raises(InvalidSnapshot, match=f"{path}: .*{message}"):
        root.read()
