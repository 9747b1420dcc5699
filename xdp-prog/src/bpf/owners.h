// SPDX-License-Identifier: (MIT OR GPL-2.0-only)
//
// The common part of a shared interface's programs: the owner of a port, and the counters after `enum reason`.

#pragma once

#define PROGRAM_REASONS (REASONS + 9)
#include "frame.h"

/* What the programs did with the other frames, after `enum reason`. */
enum switched {
	TO_CLIENT = REASONS,
	TO_LOCAL_CLIENT,
	TO_WIRE,
	DROPPED_FOREIGN, /* the client does not own the source, or it is no TCP segment */
	REFUSED, /* to an own address, at a port without owner: answered by a reset */
	DROPPED_NO_OWNER, /* the same, but not to be answered */
	DROPPED_NO_SOCKET,
	DROPPED_PEER, /* the administrator does not allow this peer */
	DROPPED_RATE, /* the client sends faster than the administrator allows */
};

/* The slot of the client that owns a port. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct port_key);
	__type(value, __u32);
} owners SEC(".maps");

/* The slot of the owner of a port of `local`, one of the interface's addresses; NULL if the port has none. */
static __always_inline __u32 *owner(const struct address *local, __be16 port)
{
	struct port_key key = { .local = *local, .port = port };
	__u32 *slot = bpf_map_lookup_elem(&owners, &key);

	if (slot)
		return slot;
	__builtin_memset(&key.local, 0, sizeof(key.local));
	return bpf_map_lookup_elem(&owners, &key);
}

/* The slot of the client that a frame from the wire is for; NULL if it is for none. */
static __always_inline __u32 *receiver(const struct packet *packet)
{
	__u32 *slot = owner(&packet->flow.local, packet->flow.local_port);

	return slot && bpf_map_lookup_elem(&addresses, &packet->flow.local) ? slot : NULL;
}
