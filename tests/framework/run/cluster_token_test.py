"""The secret that the processes of a run share."""

from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path

import pytest

from tekso.framework.cluster import ClusterError
from tekso.framework.run import cluster_token
from tekso.framework.run.cluster_token import Token

SECRET = "a secret of a few words"


def test_proof_depends_on_the_secret_and_on_every_fact() -> None:
    token, other = Token(b"1", "here"), Token(b"2", "here")
    proof = token.proof("process 0", 1, "x")
    assert token.proves(proof, "process 0", 1, "x")
    for facts in (("other", 1, "x"), ("process 0", 2, "x"), ("process 0", 1, "y"), (), (1, "x")):
        assert not token.proves(proof, *facts)
    assert not other.proves(proof, "process 0", 1, "x")
    for wrong in (None, 1, "", "é", [proof], proof + "0"):
        assert not token.proves(wrong, "process 0", 1, "x")
    assert "secret" not in repr(token) and "b'1'" not in repr(token)


def test_first_process_creates_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    logdir = str(tmp_path / "new" / "run")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: cluster_token.find(None, {}, logdir), range(8)))
    assert len({token.secret for token in found}) == 1 and len(found[0].secret) == 64
    assert os.stat(found[0].source).st_mode & 0o777 == 0o600
    assert cluster_token.find(None, {}, logdir) == found[0]
    assert cluster_token.find(None, {}, str(tmp_path / "other")).secret != found[0].secret


def test_flag_goes_before_the_variable_and_the_variable_before_the_logdir(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    variable = {cluster_token.VARIABLE: "another secret, as long"}
    assert cluster_token.find(str(file), variable, "gs://x/y").secret == SECRET.encode()
    assert cluster_token.find(None, variable, "gs://x/y").secret == b"another secret, as long"
    assert list(tmp_path.iterdir()) == [file]


def test_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o640)
    with pytest.raises(ClusterError, match=r"other users can read .*chmod 600"):
        cluster_token.find(str(file), {}, str(tmp_path))


@pytest.mark.parametrize("text", ["", "short", "x" * 5000])
def test_token_of_a_wrong_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(cluster_token, "_WRITTEN_WITHIN_S", 0.0)
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ClusterError, match="a token has 16 to 4096 characters"):
        cluster_token.find(str(file), {}, str(tmp_path))


def test_missing_file_and_remote_logdir_are_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"--cluster_token_file: cannot read .*No such"):
        cluster_token.find(str(tmp_path / "none"), {}, str(tmp_path))
    with pytest.raises(ClusterError, match="set TEKSO_CLUSTER_TOKEN"):
        cluster_token.find(None, {}, "gs://bucket/run")
