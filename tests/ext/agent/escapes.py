"""Programs that try to escape from a sandbox: each prints ESCAPED on success, or leaves a mark that the host finds."""

from __future__ import annotations

ESCAPES = {
    "a file of the host": "open({secret!r}).read(); escaped()",
    "a file of the project": "open({project!r}).read(); escaped()",
    "the users of the host": "'nologin' in open('/etc/passwd').read() and escaped()",
    "a file by object subclasses": """
        for c in ().__class__.__base__.__subclasses__():
            if c.__name__ == '_wrap_close':
                c.__init__.__globals__['system']('cp {secret} {mark}')
                c.__init__.__globals__['open']({secret!r}).read() and escaped()""",
    "another's environment": """
        import os
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                if b'hunter2' in open(f'/proc/{{pid}}/environ', 'rb').read(): escaped()
            except OSError: pass""",
    "a shell": "import subprocess; subprocess.run(['/bin/sh', '-c', 'echo x > {mark}'])",
    "a shell by os.system": "import os; os.system('echo x > {mark}')",
    "TCP on loopback": "import socket; socket.create_connection(('127.0.0.1', {port})); escaped()",
    "UDP on loopback": "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {udp_port}))",
    "a socket file": "import socket; socket.socket(1).connect({socket!r}); escaped()",
    "an abstract socket": "import socket; socket.socket(1).connect(chr(0) + {abstract!r}); escaped()",
    "a child of a child": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1)
                open({mark!r}, 'w')""",
    "a session of its own": """
        import subprocess
        subprocess.Popen(['/bin/sh', '-c', 'trap "" HUP TERM; sleep 1; echo x > {mark}'], start_new_session=True)""",
    "the interpreter's library": "import os; open(os.path.dirname(os.__file__) + '/{name}.py', 'w'); escaped()",
    "the death of others": "import os; os.kill({victim}, 9); escaped()",
    "the death of all": "import os; os.kill({victim}, 0); os.kill(-1, 9); escaped()",
}  # fmt: skip
"""Attempts that succeed without isolation."""

KERNEL_ESCAPES = {
    "tracing another": "libc.ptrace(16, {victim}, 0, 0) == 0 and escaped()",
    "tracing its guard": "libc.ptrace(16, 1, 0, 0) == 0 and escaped()",
    "tracing itself": "libc.ptrace(0, 0, 0, 0) == 0 and escaped()",
    "the memory of its guard": "open('/proc/1/mem', 'rb+'); escaped()",
    "descriptors of its guard": "import os; [os.readlink(f'/proc/1/fd/{{n}}') for n in range(9)] and escaped()",
    "its own descriptors": "import os; len(os.listdir('/proc/self/fd')) > 4 and escaped()",
    "a namespace of users": "libc.unshare(0x10000000) == 0 and escaped()",
    "a namespace of mounts": "libc.unshare(0x00020000) == 0 and escaped()",
    "a process in a new namespace": "libc.syscall({clone}, 0x10000011, 0, 0, 0, 0) >= 0 and escaped()",
    "a mount": "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 and escaped()",
    "a writable root": "libc.mount(None, b'/usr', None, 4096 | 32, None) == 0 and escaped()",
    "the old root": "import os; os.mkdir('x'); os.chroot('x'); escaped()",
    "root": "import os; os.setuid(0); escaped()",
    "a device": "import os; os.mknod('disk', 0o60600, os.makedev(253, 0)); escaped()",
    "a disk": "import glob; (glob.glob('/dev/[svn][dv]*') or glob.glob('/sys/*')) and escaped()",
    "settings of the kernel": "open('/proc/sys/kernel/core_pattern', 'w'); escaped()",
    "a key": "libc.syscall({add_key}, b'user', b'x', b'x', 1, -3) > 0 and escaped()",
    "memory without a file": "libc.memfd_create(b'x', 0) >= 0 and escaped()",
    "shared memory": "libc.shmget(0, 4096, 0o1600) >= 0 and escaped()",
    "a socket to the hypervisor": "import socket; socket.socket(40, 1); escaped()",
    "a socket to the kernel": "import socket; socket.socket(16, 3); escaped()",
}

STRICT_ESCAPES = {
    "a process": "import os; os.fork(); escaped()",
    "a program": "import os; os.execv('/bin/true', ['true']) or escaped()",
    "a spawned program": "import os; os.posix_spawn('/bin/true', ['true'], dict()) and escaped()",
    "a socket": "import socket; socket.socket(); escaped()",
    "a pair of sockets": "import socket; socket.socketpair(); escaped()",
}
"""Attempts from Python with a limit of one process."""

BEGIN = """
import ctypes
libc = ctypes.CDLL(None)
def escaped():
    print('ESCAPED')
"""


def program(text: str, facts: dict[str, object]) -> str:
    """The program of an attempt against the host of ``facts``."""
    lines = text.format(**facts).split("\n")
    return BEGIN + "\n".join(line.removeprefix("        ") for line in lines)
