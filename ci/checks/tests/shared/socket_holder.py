"""What an unprivileged holder of a granted AF_XDP socket can do with it beside sending and receiving: nothing.

Standard input is the socket, which is neither registered nor bound. Ends with status 0 if the kernel refuses everything.
"""

import errno
import fcntl
import os
import socket
import struct
import sys

SOL_XDP = 283
SIOCGSKNS = 0x894C
# Signals to the own process (FIOGETOWN, SIOCGPGRP), and the IPv4 addresses of the namespace, which has none (SIOCGIFCONF).
HARMLESS = (0x8903, 0x8904, 0x8912)
# A mark, and buffers beyond the limits.
PRIVILEGED = {"SO_MARK": 36, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33}

AF_XDP = 44
# With its kind, because the kernel answers no question about the name of such a socket.
granted = socket.socket(AF_XDP, socket.SOCK_RAW, 0, fileno=os.dup(0))
problems = []

for request in range(0x8900, 0x8A00):
    for size in (0, 40):
        try:
            fcntl.ioctl(granted.fileno(), request, b"far".ljust(size, b"\0") if size else 0)
            if request not in HARMLESS:
                problems.append(f"ioctl {request:#x} is possible")
        except OSError as error:
            if request == SIOCGSKNS:
                print("the namespace of the socket:", errno.errorcode[error.errno])
                if error.errno != errno.EPERM:
                    problems.append(f"the namespace of the socket: {error}")

for name, option in PRIVILEGED.items():
    try:
        granted.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        problems.append(f"{name} is possible")
    except OSError as error:
        print(name, errno.errorcode[error.errno])

# Memory of others: addresses that this process does not have, and lengths beyond the limit on locked memory.
for address, length in ((0, 4096), (1 << 47, 4096), (4096, 1 << 46)):
    try:
        granted.setsockopt(SOL_XDP, 4, struct.pack("<QQIIII", address, length, 4096, 0, 0, 0))
        problems.append(f"memory at {address:#x} is registered")
    except OSError as error:
        print(f"{length} bytes at {address:#x}:", errno.errorcode[error.errno])

for where in ("/proc/self/net/dev", "/proc/self/ns/net"):
    assert os.path.exists(where)
print("\n".join(problems))
sys.exit(bool(problems))
