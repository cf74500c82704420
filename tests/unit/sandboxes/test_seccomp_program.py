"""The seccomp program, run by an interpreter of its instructions: what is allowed, refused, or deadly."""

import struct

import pytest

from rollmill.sandboxes.guest import seccomp
from rollmill.sandboxes.guest.kernel import CLONE_NEWPID, CLONE_NEWUSER

ALLOW, KILL = 0x7FFF0000, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7
ARCHITECTURES = {"x86_64": X86, "aarch64": ARM}


def errno_of(number: int) -> int:
    return 0x00050000 | number


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Run the program as the kernel does, on the data that a call hands to it."""
    program = seccomp.program(machine)
    assert program is not None
    return run(program, machine, number, *arguments, architecture=architecture)


def run(program: bytes, machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    architecture = ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    accumulator, at = 0, 0
    while True:
        code, then, otherwise, value = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x25: accumulator > value, 0x45: bool(accumulator & value)}[code]
            at += then if holds else otherwise


READ = {"x86_64": 0, "aarch64": 63}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
IOCTL = {"x86_64": 16, "aarch64": 29}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
class TestFilter:
    def test_ordinary_calls_pass(self, machine):
        assert verdict(machine, READ[machine]) == ALLOW

    def test_every_listed_call_is_refused(self, machine):
        assert {verdict(machine, number) for number in seccomp.REFUSED[machine].values()} == {errno_of(1)}

    def test_contexts_of_the_whole_machine_do_not_exist(self, machine):
        assert {verdict(machine, number) for number in seccomp.ABSENT[machine].values()} == {errno_of(38)}

    @pytest.mark.parametrize("pid", [1, 1 | 7 << 32])  # the kernel takes the lower half
    def test_the_first_process_is_bounded_by_nobody(self, machine, pid):
        for number in seccomp._BOUNDS[machine].values():
            assert verdict(machine, number, pid) == errno_of(1)
            assert verdict(machine, number, 0) == ALLOW
            assert verdict(machine, number, 2) == ALLOW

    def test_nobody_changes_the_priority_of_the_first_process_or_of_all_of_a_user(self, machine):
        calls = seccomp._PRIORITIES[machine]
        process, user = {"setpriority": 0, "ioprio_set": 1}, {"setpriority": 2, "ioprio_set": 3}
        for name, number in calls.items():
            assert verdict(machine, number, process[name], 1, 19) == errno_of(1)
            assert verdict(machine, number, user[name], 0, 19) == errno_of(1)
            assert verdict(machine, number, process[name], 0, 19) == ALLOW

    def test_a_call_of_another_architecture_kills(self, machine):
        other = ARM if machine == "x86_64" else X86
        assert verdict(machine, READ[machine], architecture=other) == KILL

    def test_calls_newer_than_the_list_do_not_exist(self, machine):
        for number in (seccomp.LAST_KNOWN_CALL + 1, 600, 0x40000000, 0xFFFFFFFF):
            assert verdict(machine, number) == errno_of(38)
        assert verdict(machine, seccomp.LAST_KNOWN_CALL) == ALLOW

    def test_forks_and_threads_pass_and_namespaces_do_not(self, machine):
        assert verdict(machine, CLONE[machine], 17) == ALLOW
        assert verdict(machine, CLONE[machine], 0x003D0F00) == ALLOW  # what a C library asks for a thread
        for flag in (CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWUSER | 17):
            assert verdict(machine, CLONE[machine], flag) == errno_of(1)
        assert verdict(machine, 435) == errno_of(38)  # clone3

    def test_only_ordinary_sockets_exist(self, machine):
        allowed = {family for family in range(64) if verdict(machine, SOCKET[machine], family, 1, 0) == ALLOW}
        assert allowed == {1, 2, 10, 16}
        assert verdict(machine, SOCKET[machine], 40, 1, 0) == errno_of(97)  # AF_VSOCK
        assert verdict(machine, SOCKET[machine], 16, 3, 0) == ALLOW
        assert verdict(machine, SOCKET[machine], 16, 3, 9) == errno_of(97)  # netlink, audit

    def test_nobody_types_into_another_terminal(self, machine):
        assert verdict(machine, IOCTL[machine], 0, 0x5412) == errno_of(1)
        assert verdict(machine, IOCTL[machine], 0, 0x541C) == errno_of(1)
        assert verdict(machine, IOCTL[machine], 0, 0x5401) == ALLOW


def test_an_architecture_whose_numbers_are_not_known_has_no_filter():
    assert seccomp.program("riscv64") is None


def test_the_list_has_the_same_calls_everywhere_but_those_that_one_architecture_never_had():
    only_x86 = set(seccomp.REFUSED["x86_64"]) - set(seccomp.REFUSED["aarch64"])
    assert only_x86 == {
        "create_module", "query_module", "get_kernel_syms", "iopl", "ioperm", "uselib", "modify_ldt", "sysctl",
    }  # fmt: skip
    assert set(seccomp.REFUSED["aarch64"]) <= set(seccomp.REFUSED["x86_64"])


KILL_CALLS = {"x86_64": (62, 200, 129, 302, 434), "aarch64": (129, 130, 138, 261, 434)}
PAIR_CALLS = {"x86_64": (234, 297), "aarch64": (131, 240)}
FCNTL = {"x86_64": 72, "aarch64": 25}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
class TestGuard:
    def guarded(self, machine, number, *arguments):
        return run(seccomp.guard(machine), machine, number, *arguments)

    def test_calls_aimed_at_the_first_process_are_refused_and_at_others_pass(self, machine):
        for number in KILL_CALLS[machine]:
            assert self.guarded(machine, number, 1, 9) == errno_of(1)
            # Only the lower half is a process id for the kernel.
            assert self.guarded(machine, number, 0x7_0000_0001, 9) == errno_of(1)
            assert [self.guarded(machine, number, pid, 1) for pid in (0, 2, 11, 2**64 - 1)] == [ALLOW] * 4

    def test_a_thread_of_the_first_process_is_refused_by_either_number(self, machine):
        for number in PAIR_CALLS[machine]:
            assert [self.guarded(machine, number, *ids, 9) for ids in ((1, 1), (1, 2), (2, 1))] == [errno_of(1)] * 3
            assert self.guarded(machine, number, 2, 2, 1) == ALLOW

    def test_a_signal_cannot_be_ordered_for_later(self, machine):
        refused = [self.guarded(machine, FCNTL[machine], 5, command, 2) for command in (8, 10, 15)]
        refused += [self.guarded(machine, IOCTL[machine], 5, request) for request in (0x8901, 0x8902)]
        assert refused == [errno_of(1)] * 5
        assert self.guarded(machine, FCNTL[machine], 5, 3) == ALLOW  # F_GETFL
        assert self.guarded(machine, IOCTL[machine], 5, 0x5413) == ALLOW

    def test_all_else_passes_and_another_architecture_kills(self, machine):
        assert self.guarded(machine, READ[machine], 1, 1) == ALLOW
        other = ARM if machine == "x86_64" else X86
        assert run(seccomp.guard(machine), machine, READ[machine], architecture=other) == KILL
