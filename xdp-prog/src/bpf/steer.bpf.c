// SPDX-License-Identifier: (MIT OR GPL-2.0-only)
//
// The steering program of a process that owns its interface. It redirects the frames of known TCP four-tuples, SYNs to
// listening ports and ICMP errors that quote a known four-tuple to the AF_XDP socket of their receive queue, and
// passes every other frame to the kernel. It does not modify frames.
//
// User space (`SteeringProgram` in lib.rs) fills the maps and owns them.

#define PROGRAM_REASONS (REASONS + 4)
#include "frame.h"

/* What the program did with the other frames, after `enum reason`. */
enum steered {
	STEERED_FLOW = REASONS,
	STEERED_LISTENER,
	STEERED_ICMP,
	NO_SOCKET,
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, __u8);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct port_key);
	__type(value, __u8);
} listeners SEC(".maps");

/* The AF_XDP socket of each receive queue. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

static __always_inline int steer(struct xdp_md *ctx, __u32 reason)
{
	/* bpf_redirect_map returns its flags argument when the queue has no socket. */
	int action = bpf_redirect_map(&sockets, ctx->rx_queue_index, XDP_PASS);

	count(action == XDP_REDIRECT ? reason : NO_SOCKET);
	return action;
}

static __always_inline bool listening(const struct address *local, __be16 port)
{
	struct port_key key = { .local = *local, .port = port };

	if (bpf_map_lookup_elem(&listeners, &key))
		return true;
	__builtin_memset(&key.local, 0, sizeof(key.local));
	return bpf_map_lookup_elem(&listeners, &key) && bpf_map_lookup_elem(&addresses, local);
}

SEC("xdp")
int xwarp_steer(struct xdp_md *ctx)
{
	struct packet packet = {};
	int reason = parse(ctx, &packet);

	if (reason != PARSED)
		return pass(reason);
	if (bpf_map_lookup_elem(&flows, &packet.flow))
		return steer(ctx, packet.quoted ? STEERED_ICMP : STEERED_FLOW);
	if (packet.syn && listening(&packet.flow.local, packet.flow.local_port))
		return steer(ctx, STEERED_LISTENER);
	return pass(packet.quoted ? PASSED_ICMP : PASSED_TCP);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
