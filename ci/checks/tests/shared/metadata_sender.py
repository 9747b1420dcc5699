"""Sends one frame twice from a granted AF_XDP socket. The second time the kernel shall write a checksum over the source port.

Standard input is the socket, which is neither registered nor bound. Arguments: the index of its interface, the frame in hex.
"""

import ctypes
import mmap
import os
import socket
import struct
import sys

AF_XDP, SOL_XDP = 44, 283
MMAP_OFFSETS, RX_RING, TX_RING, UMEM_REG, FILL_RING, COMPLETION_RING = 1, 2, 3, 4, 5, 6
COPY = 1 << 1
TX_METADATA_LEN, METADATA_BYTES = 1 << 2, 16
TX_METADATA, CHECKSUM = 1 << 1, 1 << 1
TX_OFFSET = 0x80000000
CHUNKS, CHUNK, ENTRIES = 16, 4096, 64
TCP_HEADER, SOURCE_PORT = 34, 0


class Address(ctypes.Structure):
    """sockaddr_xdp"""

    _fields_ = [
        ("family", ctypes.c_uint16),
        ("flags", ctypes.c_uint16),
        ("index", ctypes.c_uint32),
        ("queue", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
    ]


index, frame = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
granted = socket.socket(AF_XDP, socket.SOCK_RAW, 0, fileno=os.dup(0))
memory = mmap.mmap(-1, CHUNKS * CHUNK)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
registration = struct.pack("<QQIIII", start, len(memory), CHUNK, 0, TX_METADATA_LEN, METADATA_BYTES)
granted.setsockopt(SOL_XDP, UMEM_REG, registration)
for ring in (FILL_RING, COMPLETION_RING, RX_RING, TX_RING):
    granted.setsockopt(SOL_XDP, ring, ENTRIES)
# For each ring: the places of producer, consumer, descriptors and flags.
offsets = struct.unpack("<16Q", granted.getsockopt(SOL_XDP, MMAP_OFFSETS, 128))
producer, _, descriptors, _ = offsets[4:8]
ring = mmap.mmap(granted.fileno(), descriptors + ENTRIES * 16, offset=TX_OFFSET)
address = Address(AF_XDP, COPY, index, 0, 0)
if ctypes.CDLL(None, use_errno=True).bind(granted.fileno(), ctypes.byref(address), 16):
    sys.exit(f"bind: {os.strerror(ctypes.get_errno())}")
for number, option in enumerate((0, TX_METADATA)):
    at = number * CHUNK + 256
    metadata = struct.pack("<QHHI", CHECKSUM, TCP_HEADER, SOURCE_PORT, 0)
    memory[at - METADATA_BYTES : at + len(frame)] = metadata + frame
    struct.pack_into("<QII", ring, descriptors + 16 * number, at, len(frame), option)
    struct.pack_into("<I", ring, producer, number + 1)
    granted.send(b"", socket.MSG_DONTWAIT)
print("sent 2")
