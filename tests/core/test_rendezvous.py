"""The processes of a run meet, or say why they do not."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from whet.core import rendezvous
from whet.core.errors import ExitCode
from whet.core.rendezvous import RendezvousError, StartBarrier, describe_skew, join_rendezvous


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_POLL_S": 0.01, "_HINT_S": 0.05, "_ANSWER_S": 0.3, "_UNREACHABLE_S": 0.1}.items():
        monkeypatch.setattr(rendezvous, name, value)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def barrier(
    port: int, count: int = 2, name: str = "run", limit_s: float = 60.0, host: str = "127.0.0.1"
) -> StartBarrier:
    return StartBarrier(host, port, name, count, limit_s=limit_s, next_hint=0.05)


def test_all_begin_when_the_last_has_come_and_one_hosts_the_store(port: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        hosting = pool.submit(join_rendezvous, barrier(port, 3), True)
        first = pool.submit(join_rendezvous, barrier(port, 3), False)
        assert not first.done()
        second = pool.submit(join_rendezvous, barrier(port, 3), False)
        assert [each.result(timeout=30)[1] for each in (hosting, first, second)] == [True, False, False]
        [store, _] = hosting.result()
        late = barrier(port, 3, limit_s=0.0)
        with pytest.raises(RendezvousError, match=r"3 machines have met at .* without .*launch\.nodes"):
            rendezvous._join(late, rendezvous._client(late))
        assert store.check([rendezvous._BEGIN])


def test_who_is_missing_is_said_first_and_ends_it_later(port: int, capsys: Any) -> None:
    with pytest.raises(RendezvousError) as error:
        join_rendezvous(barrier(port, limit_s=0.5), may_host=True)
    assert error.value.exit_code == ExitCode.FAILED
    missing = f"1 of 2 machines have come to 127.0.0.1:{port} ({socket.gethostname()}). Start the same command"
    assert missing in str(error.value)
    assert missing in capsys.readouterr().err.replace("\n", " ")


def test_a_port_of_another_program(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        for may_host in (True, False):
            with pytest.raises(RendezvousError, match=f"127.0.0.1:{port} is taken: another program") as error:
                join_rendezvous(barrier(port), may_host)
            assert error.value.exit_code == ExitCode.INPUT


def test_a_port_of_another_run(port: int) -> None:
    store = rendezvous._host(barrier(port, name="mine"))
    with pytest.raises(RendezvousError, match=r"is taken: the run 'mine' uses it\. Give another port"):
        join_rendezvous(barrier(port, name="other"), may_host=False)
    assert store is not None


def test_nobody_listens(port: int, capsys: Any) -> None:
    with pytest.raises(RendezvousError, match=f"nothing listens at 127.0.0.1:{port} yet"):
        join_rendezvous(barrier(port, limit_s=0.3), may_host=False)
    assert "Start the same command on 127.0.0.1" in capsys.readouterr().err.replace("\n", " ")


def test_an_address_that_does_not_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(RendezvousError, match=r"10\.1\.2\.3:\d+ cannot be reached from .*No route to host.*firewall"):
        join_rendezvous(barrier(port, host="10.1.2.3"), may_host=False)


def test_clocks_are_compared() -> None:
    assert describe_skew(2.0, "a", "b") is None
    assert "the clock of a is 3600 s ahead of that of b" in (describe_skew(3600.0, "a", "b") or "")
    assert "the clock of a is 90 s behind that of b" in (describe_skew(-90.0, "a", "b") or "")
