"""Code of others runs here: in bubblewrap, without network, without files of the user, within limits. Or not at all.

Each side of a test (`inside`) gets a sandbox of its own:

* new namespaces for users, processes, network, mounts, IPC, host name and cgroups, no capabilities, a new session;
* a read-only Python and system libraries, no /proc, no /home, no /etc; /tmp is an empty tmpfs of 16 MiB;
* an empty environment and no descriptor but its pipes;
* a filter of system calls: no new process, no socket, no namespace, no tracing, no memory files;
* limits on memory, processor time, file size and descriptors; the time on the clock is limited from outside;
* it ends when this process ends, however that happens (``--die-with-parent``).
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from typing import IO, Any, Literal

from mless.errors import MlessError

_TMP_BYTES = 16 << 20
_VERDICT_BYTES = 1 << 16
_OTHER_TASK = "choose a task that runs no code"


class NoSandbox(MlessError):
    """Code cannot be run safely on this machine, so it is not run: what was found, and how to mend it where it can be."""

    def __init__(self, says: str, mend: str = "") -> None:
        super().__init__("; ".join([says, f"{mend}, or {_OTHER_TASK}" if mend else _OTHER_TASK]))
        self.says, self.mend = says, mend


@dataclass(frozen=True, slots=True)
class Limits:
    """For one answer and one problem. `wall` covers both sides and their start."""

    wall: float = 60.0
    cpu: int = 15
    memory: int = 1 << 30


# ---- system calls ----------------------------------------------------------------------------------------------------

#: Refused calls, with their numbers on x86-64 and on aarch64 (None: not there).
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "open_by_handle_at": (304, 265), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "personality": (135, 92),
}  # fmt: skip
#: Of each machine: its mark in the kernel's audit data, its column above, and the number of `clone`.
_MACHINES = {"x86_64": (0xC000003E, 0, 56), "aarch64": (0xC00000B7, 1, 220)}
_CLONE3 = 435
_X32 = 0x40000000  # from here on numbers mean another way of calling
_CLONE_THREAD = 0x00010000
_LOAD, _EQUALS, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def seccomp_filter(machine: str) -> bytes:
    """The filter as the kernel reads it: a list of steps (code, jump if true, jump if false, value)."""
    if machine not in _MACHINES:
        raise NoSandbox(
            f"code is run only on {' and '.join(_MACHINES)}, where its system calls can be filtered, and this is {machine}"
        )
    mark, column, clone = _MACHINES[machine]
    steps = [(_LOAD, 0, 0, 4), (_EQUALS, 1, 0, mark), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    steps += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _EPERM)]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            steps += [(_EQUALS, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    # The C library then takes `clone`, whose flags a filter can read.
    steps += [(_EQUALS, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    # A thread is no new process; its stack counts as memory.
    steps += [(_EQUALS, 0, 3, clone), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _EPERM)]
    steps += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


# ---- the sandbox -----------------------------------------------------------------------------------------------------


def _bwrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise NoSandbox(
            "code runs only in bubblewrap's sandbox, and bwrap is not installed",
            "install it (apt-get install bubblewrap)",
        )
    return found


def _python() -> tuple[str, str]:
    """The real interpreter and the folder of its library, outside of any virtual environment."""
    base: str = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(base), os.path.join(sys.base_prefix, "lib")


def _command(files: dict[str, int], filter_: int, role: str) -> list[str]:
    executable, library = _python()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store", "/etc/ld.so.cache")
    command = [_bwrap(), "--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    for path in system:
        command += ["--ro-bind-try", path, path]
    command += ["--ro-bind", library, "/python/lib", "--ro-bind", executable, "/python/bin/python3"]
    if os.path.isdir(f"{library}/{version}/site-packages"):
        command += ["--tmpfs", f"/python/lib/{version}/site-packages"]
    for path in ("/dev/null", "/dev/urandom"):
        command += ["--dev-bind", path, path]
    command += ["--size", str(_TMP_BYTES), "--tmpfs", "/tmp"]
    for path, number in files.items():
        command += ["--ro-bind-data", str(number), path]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(filter_)]
    command += ["--setenv", "PYTHONHASHSEED", "0", "--setenv", "LD_LIBRARY_PATH", "/python/lib"]
    # -P and -s as in -I, which would also ignore the fixed order of hashes.
    return [*command, "/python/bin/python3", "-P", "-s", "-S", "-B", "/inside.py", role]


def _file(stack: ExitStack, content: bytes) -> int:
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    file.write(content)
    file.flush()
    file.seek(0)
    return file.fileno()


def _started(
    stack: ExitStack,
    role: Literal["answer", "check"],
    job: dict[str, Any],
    pipes: tuple[IO[bytes], IO[bytes]],
    limits: Limits,
    *more: int,
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """A sandbox with a role's job, which reads and writes `pipes`; and what bubblewrap itself complains of."""
    most = {"AS": limits.memory, "CPU": limits.cpu, "FSIZE": _TMP_BYTES, "NOFILE": 64, "NPROC": 32, "CORE": 0}
    text = resources.files("mless.tasks.grading").joinpath("inside.py").read_bytes()
    files = {"/inside.py": _file(stack, text), "/job.json": _file(stack, json.dumps(job | {"limits": most}).encode())}
    filter_ = _file(stack, seccomp_filter(platform.machine()))
    complaints = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    process = subprocess.Popen(
        _command(files, filter_, role),
        stdin=pipes[0],
        stdout=pipes[1],
        stderr=complaints,
        cwd="/",
        env={},
        pass_fds=(*files.values(), filter_, *more),
    )
    # Killing bubblewrap kills all in its sandbox.
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process, complaints


def run_tests(code: str, entry: str, prompt: str, test: str, limits: Limits | None = None) -> tuple[bool, str]:
    """Whether the function `entry` of `code` passes `test`, and why it was judged so."""
    limits = limits or Limits()
    with ExitStack() as stack:
        to_answer, from_checker = _pipe(stack)
        to_checker, from_answer = _pipe(stack)
        heard, verdict = _pipe(stack)
        deadline = time.monotonic() + limits.wall
        tests = {"prompt": prompt, "test": test, "entry": entry, "verdict": verdict.fileno()}
        sides = [
            _started(stack, "answer", {"code": code, "entry": entry}, (to_answer, from_answer), limits),
            _started(stack, "check", tests, (to_checker, from_checker), limits, verdict.fileno()),
        ]
        # Where a side ends, the other has to notice: so no end of their pipes stays open here.
        for end in (to_answer, from_checker, to_checker, from_answer, verdict):
            end.close()
        said = _read_until(heard, deadline)
        if said is None:
            return False, "the tests ran out of time"
        for _, complaints in sides:
            complaints.seek(0)
            if (words := complaints.read(400)).startswith(b"bwrap:"):
                raise _refusal(words.decode("utf-8", "replace"))
        try:
            found = json.loads(said)
            return bool(found["passed"]), str(found["why"])
        except (ValueError, KeyError, TypeError):
            return False, "the tests' process ended"


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """A pipe's two ends, as objects that may be closed twice: numbers are given out again, in other threads too."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", buffering=0)), stack.enter_context(open(write, "wb", buffering=0))


def _read_until(stream: IO[bytes], deadline: float) -> bytes | None:
    """What comes up to the end or a line's end; None where time runs out."""
    said, poll = b"", select.poll()
    poll.register(stream, select.POLLIN | select.POLLHUP)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            part = stream.read(4096)
            said += part
            if not part or b"\n" in said or len(said) > _VERDICT_BYTES:
                return said
    return None


def _refusal(words: str) -> NoSandbox:
    return NoSandbox(
        f"bubblewrap cannot make a sandbox here ({' '.join(words.split())})",
        "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a "
        "container they must be allowed from outside)",
    )


def require_sandbox() -> None:
    """Refuse where code cannot be run safely: a right answer must pass in a real sandbox here, and a wrong one must not."""
    prompt, test = 'def one():\n    """One."""\n', "def check(candidate):\n    assert candidate() == 1\n"
    for code, right in (("def one():\n    return 1\n", True), ("def one():\n    return 2\n", False)):
        try:
            passed, why = run_tests(code, "one", prompt, test)
        except OSError as fault:  # a file of that name that is no program
            passed, why = not right, str(fault)
        if passed != right:
            raise NoSandbox(
                f"bwrap is installed, but its sandbox does not work here ({why})",
                "install it anew (apt-get install --reinstall bubblewrap), and see what `bwrap --ro-bind / / true` says",
            )
