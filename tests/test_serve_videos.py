"""Videos of the ask server: uploads and their limits, files below directories and nothing else, who may ask at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from ask_server import Asking, Choosing
from conftest import CASES, LONG
from disk import full_disk

from paravt.errors import DataError
from paravt.models import QwenVL
from paravt.serve.security import Access
from paravt.serve.videos import Library, inside, open_root, safe_name, video_files

BASE = CASES / "video" / "base.mp4"


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    (tmp_path / "uploads").mkdir()
    return tmp_path / "uploads"


@pytest.fixture
def asking(tiny: QwenVL, uploads: Path) -> Iterator[Asking]:
    """Uploads of at most 256 KiB and 60 seconds."""
    with Asking(Choosing(tiny), Library([], uploads, max_seconds=60), max_upload_bytes=1 << 18) as running:
        yield running


def test_an_upload_can_be_asked_about_played_and_removed(asking: Asking, uploads: Path) -> None:
    answer = asking.upload(BASE, "My <b>clip.mp4")
    assert answer.status_code == 201, answer.text
    video = answer.json()
    assert video["name"] == "My _b_clip.mp4"
    assert video["duration"] > 0
    assert (video["width"], video["height"]) > (0, 0)
    assert asking.client.get("/v1/videos").json() == [video]
    assert [path.name for path in uploads.iterdir()] == [video["id"]]

    content = BASE.read_bytes()
    whole = asking.client.get(video["url"])
    assert (whole.status_code, whole.content) == (200, content)
    assert whole.headers["content-type"] == "video/mp4"
    assert whole.headers["x-content-type-options"] == "nosniff"
    part = asking.client.get(video["url"], headers={"Range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, content[100:200])
    assert part.headers["content-range"] == f"bytes 100-199/{len(content)}"
    assert asking.client.get(video["url"], headers={"Range": f"bytes={len(content)}-"}).status_code == 416

    id = asking.ask(video["id"], "slow")
    assert list(asking.events(id))[-1][1] == "done"
    assert asking.client.delete(f"/v1/videos/{video['id']}").status_code == 204
    assert list(uploads.iterdir()) == []
    assert asking.client.get(video["url"]).status_code == 404
    assert asking.client.post("/v1/ask", json={"video": video["id"], "question": "?"}).status_code == 404


@pytest.mark.parametrize(
    ("name", "status", "detail"),
    [
        ("longgop.mp4", 422, "longgop.mp4: 2:00 long; at most 1:00 is taken"),
        ("facts.json", 422, "facts.json: not a readable video"),
        ("zero.mp4", 422, "zero.mp4: the file is empty"),
        ("audioonly.mp4", 422, "audioonly.mp4: no video stream"),
    ],
)
def test_what_is_no_video_leaves_nothing_behind(
    asking: Asking, uploads: Path, name: str, status: int, detail: str
) -> None:
    answer = asking.upload(CASES / "video" / name, name)
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(detail)
    assert list(uploads.iterdir()) == []


def test_too_large_is_refused_however_it_is_sent(asking: Asking, uploads: Path) -> None:
    def chunks() -> Iterator[bytes]:  # nobody says beforehand how much this will be
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="v.mp4"\r\n\r\n'
        for _ in range(40):
            yield b"\0" * 10_000

    declared = asking.client.post("/v1/videos", files={"file": ("v.mp4", b"\0" * 400_000)})
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    streamed = asking.client.post("/v1/videos", content=chunks(), headers=form)
    for answer in (declared, streamed):
        assert answer.status_code == 413
        assert answer.json()["detail"] == "the file is too large; at most 0.25 MB are taken"
    assert list(uploads.iterdir()) == []


def test_what_is_no_file_has_a_limit_too(asking: Asking, uploads: Path) -> None:
    def field() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="other"\r\n\r\n'
        for _ in range(200):
            yield b"\0" * 10_000

    answer = asking.client.post(
        "/v1/videos", content=field(), headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert answer.status_code == 413
    assert list(uploads.iterdir()) == []


def test_a_disk_that_fills_up(asking: Asking, uploads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(20_000):  # the write fails
        answer = asking.upload(Path(LONG))
    assert (answer.status_code, answer.json()) == (507, {"detail": "the upload cannot be stored: File too large"})
    assert list(uploads.iterdir()) == []

    left = iter([1 << 40])  # at first; others write, too

    class Disk:
        @property
        def free(self) -> int:
            return next(left, 0)

    monkeypatch.setattr("paravt.serve.uploads.shutil.disk_usage", lambda path: Disk())
    answer = asking.upload(Path(LONG))
    assert (answer.status_code, answer.json()) == (507, {"detail": "no room for uploads on the server's disk"})
    assert list(uploads.iterdir()) == []


def test_uploads_that_somebody_cleaned_up(asking: Asking, uploads: Path) -> None:
    video = asking.upload(BASE).json()
    shutil.rmtree(uploads)
    assert asking.client.get("/v1/videos").json() == []
    assert asking.client.get(video["url"]).status_code == 404
    answer = asking.upload(BASE)
    assert (answer.status_code, answer.json()) == (
        507, {"detail": "the upload cannot be stored: No such file or directory"}
    )  # fmt: skip


def test_forms_that_are_none(asking: Asking, uploads: Path) -> None:
    client, clip = asking.client, BASE.read_bytes()
    broken = {"Content-Type": "multipart/form-data; boundary=x"}
    half = b'--x\r\nContent-Disposition: form-data; name="file"; filename="v.mp4"\r\n\r\nabc'
    for answer in (
        client.post("/v1/videos", content=clip),
        client.post("/v1/videos", json={"file": "x"}),
        client.post("/v1/videos", files={"other": ("v.mp4", clip)}),
        client.post("/v1/videos", files=[("file", ("v.mp4", clip)), ("file", ("w.mp4", clip))]),
        client.post("/v1/videos", content=b"no boundary here", headers=broken),
        client.post("/v1/videos", content=half, headers=broken),
    ):
        assert answer.status_code == 422, answer.text
        assert len(answer.json()["detail"].splitlines()) == 1
    assert list(uploads.iterdir()) == []


def test_an_upload_that_breaks_off_leaves_nothing_behind(asking: Asking, uploads: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="v.mp4"\r\n\r\nabc'
        raise ConnectionError("told to break off")

    with pytest.raises(ConnectionError):
        asking.client.post("/v1/videos", content=broken(), headers={"Content-Type": "multipart/form-data; boundary=x"})
    while list(uploads.iterdir()):  # until the server has noticed
        assert asking.client.get("/healthz").status_code == 200


def test_a_video_that_is_asked_about_stays(tiny: QwenVL, uploads: Path) -> None:
    with Asking(Choosing(tiny), Library([], uploads)) as asking:
        video = asking.upload(Path(LONG)).json()["id"]
        id = asking.ask(video, "hang on")
        busy = asking.client.delete(f"/v1/videos/{video}")
        assert busy.status_code == 409
        assert busy.json() == {"detail": "a question about it waits or runs; cancel it first"}
        asking.client.delete(f"/v1/ask/{id}")
        assert asking.client.delete(f"/v1/videos/{video}").status_code == 204


def test_uploads_of_before_are_there_again(tiny: QwenVL, uploads: Path) -> None:
    with Asking(Choosing(tiny), Library([], uploads)) as first:
        video = first.upload(BASE, "clip.mp4").json()
    (uploads / ".part-0123").mkdir()  # of a server that was killed
    (uploads / ".part-0123" / "half.mp4").write_bytes(b"half")
    with Asking(Choosing(tiny), Library([], uploads)) as second:
        assert second.client.get("/v1/videos").json() == [video]
    assert [path.name for path in uploads.iterdir()] == [video["id"]]


@pytest.mark.parametrize(
    ("given", "safe"),
    [
        ("talk.mp4", "talk.mp4"),
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.mp4", "boot.mp4"),
        ("/abs/olute.mp4", "olute.mp4"),
        ("..", "video"),
        ("", "video"),
        (".hidden.mp4", "hidden.mp4"),
        ("a\nb\0c\x1b[31m.mp4", "a_b_c_[31m.mp4"),
        ('<img src=x onerror="a">.mp4', "_img src=x onerror=_a__.mp4"),
        ("Vorführung 映画.webm", "Vorführung 映画.webm"),
        ("x" * 500 + ".mp4", "x" * 60 + ".mp4"),
        ("\u202egpm.exe", "_gpm.exe"),
        ("\N{CAT FACE}" * 99 + "." + "\N{CAT FACE}" * 99, "\N{CAT FACE}" * 50 + "." + "\N{CAT FACE}" * 9),
        ("a\ud800.mp4", "a_.mp4"),
    ],
)
def test_names_of_uploads(given: str, safe: str) -> None:
    assert safe_name(given) == safe


# ---------------------------------------------------------------------------------------------------- directories


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with two videos, and links in and out of it."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "deep").mkdir(parents=True)
    outside.mkdir()
    shutil.copy(BASE, root / "a.mp4")
    shutil.copy(BASE, root / "deep" / 'b\'s "name".mp4')
    shutil.copy(BASE, root / ".hidden.mp4")
    shutil.copy(BASE, root / "page.html")
    shutil.copy(BASE, outside / "secret.mp4")
    (root / "no.mp4").write_text("no video")
    (root / "out.mp4").symlink_to(outside / "secret.mp4")
    (root / "out").symlink_to(outside)
    (root / "loop.mp4").symlink_to(root / "loop.mp4")
    (root / "in.mp4").symlink_to(root / "a.mp4")
    return root


def test_only_what_is_inside_is_listed_and_served(tiny: QwenVL, tree: Path, uploads: Path) -> None:
    with Asking(Choosing(tiny), Library([tree], uploads)) as asking:
        videos = {video["name"]: video for video in asking.client.get("/v1/videos").json()}
        assert sorted(videos) == ["a.mp4", 'deep/b\'s "name".mp4', "in.mp4"]
        assert all(str(tree) not in str(video) for video in videos.values())
        assert asking.client.get(videos["a.mp4"]["url"]).content == BASE.read_bytes()
        assert asking.client.delete(f"/v1/videos/{videos['a.mp4']['id']}").status_code == 403

        # what was fine when it was listed is looked at again
        (tree / "a.mp4").unlink()
        (tree / "a.mp4").symlink_to(tree.parent / "outside" / "secret.mp4")
        assert asking.client.get(videos["a.mp4"]["url"]).status_code == 404
        body = {"video": videos["a.mp4"]["id"], "question": "?"}
        assert asking.client.post("/v1/ask", json=body).status_code == 404
        assert asking.client.get(videos["in.mp4"]["url"]).status_code == 404  # it led there


def test_a_video_that_goes_while_its_question_waits(tiny: QwenVL, tree: Path, uploads: Path) -> None:
    with Asking(Choosing(tiny), Library([tree, CASES / "video"], uploads)) as asking:
        videos = {video["name"]: video["id"] for video in asking.client.get("/v1/videos").json()}
        first = asking.ask(videos["longgop.mp4"], "hang on")
        second = asking.ask(videos["a.mp4"], "What?")
        (tree / "a.mp4").unlink()
        asking.client.delete(f"/v1/ask/{first}")
        assert list(asking.events(second))[-1][1:] == ("failed", {"message": "a.mp4: the video is gone"})


@pytest.mark.parametrize(
    "name", ["../outside/secret.mp4", "out.mp4", "out/secret.mp4", "loop.mp4", "deep", ".", "", "a.mp4/x", "a\0.mp4"]
)
def test_ways_out_lead_nowhere(tree: Path, name: str) -> None:
    assert inside(open_root(tree), name) is None
    assert inside(open_root(tree), str(tree.parent / "outside" / "secret.mp4")) is None


def test_linked_roots_and_what_is_none(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)
    root = open_root(tmp_path / "link")
    assert root == tree.resolve()
    assert "a.mp4" in list(video_files(root))
    with pytest.raises(DataError, match=r"a\.mp4: not a directory"):
        open_root(tree / "a.mp4")
    with pytest.raises(DataError, match="nowhere: not a directory"):
        open_root(tree / "nowhere")


def test_names_that_are_no_text(tmp_path: Path, uploads: Path) -> None:
    root = tmp_path / "odd"
    root.mkdir()
    shutil.copy(BASE, os.fsencode(root) + b"/caf\xe9.mp4")
    shutil.copy(BASE, root / "two\nlines.mp4")
    names = [video.name for video in Library([root], uploads).all()]
    assert names == ["caf\N{REPLACEMENT CHARACTER}.mp4", "two\N{REPLACEMENT CHARACTER}lines.mp4"]


# ---------------------------------------------------------------------------------------------------- who may ask


def test_other_names_and_other_pages_are_refused(asking: Asking) -> None:
    body = {"video": "x", "question": "?"}
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ):
        answer = asking.client.post("/v1/ask", json=body, headers=headers)
        assert answer.status_code == 403, headers
        assert list(answer.json()) == ["detail"]
    own = {"Origin": asking.url, "Sec-Fetch-Site": "same-origin"}
    assert asking.client.post("/v1/ask", json=body, headers=own).status_code == 404
    assert asking.client.get("/v1/videos", headers={"Host": "evil.example"}).status_code == 403


def test_elsewhere_a_token_is_needed(tiny: QwenVL, uploads: Path) -> None:
    access = Access(frozenset({"127.0.0.1"}), "secret")
    with Asking(Choosing(tiny), Library([], uploads), access=access) as asking:
        for path in ("/", "/v1/videos", "/v1/asks", "/healthz", "/openapi.json"):
            assert asking.client.get(path).status_code == 401
        assert asking.client.get("/v1/asks?token=wrong").status_code == 401
        assert asking.client.get("/v1/asks", headers={"Authorization": "Bearer secret"}).json() == []
        with httpx2.Client(base_url=asking.url, follow_redirects=True) as browser:  # it keeps the token as a cookie
            assert browser.get("/?token=secret").status_code == 200
            assert browser.get("/v1/asks").json() == []


def test_the_policy_of_a_file_that_says_it_is_a_page(tiny: QwenVL, uploads: Path) -> None:
    with Asking(Choosing(tiny), Library([], uploads)) as asking:
        video = asking.upload(Path(LONG), "page.html").json()
        answer = asking.client.get(video["url"], headers={"Range": "bytes=0-9"})
        assert answer.headers["content-type"] == "video/mp4"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
