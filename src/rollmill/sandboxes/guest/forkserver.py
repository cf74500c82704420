"""A warm Python inside a sandbox: forks a child for each piece of code, which saves the start of an interpreter.

Runs under whatever `python3` the sandbox's image has, so it uses nothing newer than Python 3.8 and nothing of ours. It
is part of the sandbox and trusted no more than the code it runs; the agent starts a new one if it ends.

Messages on descriptor 3, one packet each: in `{"n", "argv", "env", "cwd"}` with stdin, stdout, stderr and the code as
descriptors; out `{"n", "pid"}` and `{"n", "status", "cpu_s", "memory_bytes"}`.
"""

import array
import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
import types


def take(control):
    """Receive one packet with its descriptors."""
    message, ancillary, _, _ = control.recvmsg(1 << 18, socket.CMSG_SPACE(4 * 4))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % 4])
    return message, list(descriptors)


def run(request, descriptors):
    """Turn this fork into the code's process, and run it."""
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)
    with os.fdopen(descriptors[3], "rb") as stream:
        stream.seek(0)
        code = stream.read()
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv[:] = request["argv"]
    sys.path.insert(0, "")
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(code, "<sandbox>", "exec"), main.__dict__)


def child(request, descriptors):
    """Run the code in a fork, and end as `python` would."""
    gc.enable()
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        run(request, descriptors)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            status = stop.code or 0
        else:
            sys.stderr.write(str(stop.code) + "\n")
            status = 1
    except BaseException:
        kind, value, trace = sys.exc_info()
        # The frames of this file are not the code's.
        while trace is not None and trace.tb_frame.f_code.co_filename != "<sandbox>":
            trace = trace.tb_next
        traceback.print_exception(kind, value, trace)
        status = 1
    try:
        getattr(threading, "_shutdown")()  # noqa: B009 - waits for threads, as the interpreter's own end does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 120
    os._exit(status & 255)


def serve(control):
    """Fork for each request, and report each end."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake)
    # Forks share this memory until they write to it, and a collection would write to all of it.
    gc.collect()
    gc.disable()
    gc.freeze()
    running = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == woken:
                os.read(woken, 4096)
            else:
                message, descriptors = take(control)
                if not message:
                    return
                request = json.loads(message)
                pid = os.fork()
                if pid == 0:
                    child(request, descriptors)
                for one in descriptors:
                    os.close(one)
                running[pid] = request["n"]
                control.send(json.dumps({"n": request["n"], "pid": pid}).encode())
        while running:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                break
            report = {"n": running.pop(pid), "status": status, "cpu_s": used.ru_utime + used.ru_stime}
            report["memory_bytes"] = used.ru_maxrss * 1024
            control.send(json.dumps(report).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=3))
