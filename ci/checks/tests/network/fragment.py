"""Forwards frames between two interfaces. Packets of TCP with more than 64 bytes behind the IP header go on in fragments of 40 bytes, the
last one first in every second packet of which the first has passed: as by a gateway that clears DF in front of a narrow link."""

import itertools
import select
import socket
import struct
import sys

PACKET_IGNORE_OUTGOING = 23
PART = 40


def checksum(header):
    total = sum(struct.unpack(f"!{len(header) // 2}H", header))
    total = (total & 0xFFFF) + (total >> 16)
    return ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF


def cut(payload):
    """Offset and bytes of each part, and whether more follow."""
    for start in range(0, len(payload), PART):
        yield start, payload[start : start + PART], start + PART < len(payload)


def v4(frame, number):
    head = 4 * (frame[14] & 15)
    ip, payload = frame[14 : 14 + head], frame[14 + head : 14 + struct.unpack("!H", frame[16:18])[0]]
    for start, part, more in cut(payload):
        fields = struct.pack("!HHH", head + len(part), number & 0xFFFF, start // 8 | (0x2000 if more else 0))
        new = ip[:2] + fields + ip[8:10] + b"\0\0" + ip[12:]
        yield frame[:14] + new[:10] + struct.pack("!H", checksum(new)) + new[12:] + part


def v6(frame, number):
    ip, payload = frame[14:54], frame[54 : 54 + struct.unpack("!H", frame[18:20])[0]]
    for start, part, more in cut(payload):
        header = struct.pack("!BBHI", 6, 0, start | more, number)
        yield frame[:14] + ip[:4] + struct.pack("!HB", 8 + len(part), 44) + ip[7:] + header + part


def parts(frame, number):
    if frame[12:14] == b"\x08\0" and frame[23] == 6 and struct.unpack("!H", frame[16:18])[0] > 84:
        return list(v4(frame, number))
    if frame[12:14] == b"\x86\xdd" and frame[20] == 6 and struct.unpack("!H", frame[18:20])[0] > 64:
        return list(v6(frame, number))
    return [frame]


ends = []
for name in sys.argv[1:]:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    end.setsockopt(263, PACKET_IGNORE_OUTGOING, 1)
    end.bind((name, 0))
    # PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC
    end.setsockopt(263, 1, struct.pack("iHH8s", socket.if_nametoindex(name), 1, 0, b""))
    ends.append(end)
print("forwards", flush=True)
numbers = itertools.count(1)
while True:
    for end in select.select(ends, [], [])[0]:
        number = next(numbers)
        pieces = parts(end.recv(65535), number)
        if number % 2:
            pieces[1:] = reversed(pieces[1:])
        for piece in pieces:
            ends[1 - ends.index(end)].send(piece)
