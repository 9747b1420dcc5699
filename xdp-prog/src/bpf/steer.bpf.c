// SPDX-License-Identifier: (MIT OR GPL-2.0-only)
//
// The steering program of a process that owns its interface. It redirects the frames of known TCP four-tuples, SYNs to
// listening ports, the fragments of both, and ICMP errors that quote a known four-tuple to the AF_XDP socket of their receive queue,
// and passes every other frame to the kernel. What is ours and cannot be redirected, on a queue without a socket, is dropped, because
// the kernel's TCP would reset our connections; so are SYNs that no host can have sent. It does not modify frames.
//
// User space (`SteeringProgram` in lib.rs) fills the maps and owns them.

#define PROGRAM_REASONS (REASONS + 5)
#include "frame.h"

/* What the program did with the other frames, after `enum reason`. */
enum steered {
	STEERED_FLOW = REASONS,
	STEERED_LISTENER,
	STEERED_ICMP,
	STEERED_FRAGMENT,
	DROPPED_NO_SOCKET,
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
	/* bpf_redirect_map returns its flags argument when the queue has no socket: one that was added a moment ago, and that the
	 * driver will serve. The peer retransmits. */
	int action = bpf_redirect_map(&sockets, ctx->rx_queue_index, XDP_DROP);

	count(action == XDP_REDIRECT ? reason : DROPPED_NO_SOCKET);
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
	bool known;

	if (reason != PARSED)
		return dismiss(reason);
	if (packet.later && !fragment_owner(&packet))
		return pass(PASSED_FRAGMENT);
	known = packet.later || bpf_map_lookup_elem(&flows, &packet.flow);
	if (!known && !((packet.syn || packet.fragment) &&
			listening(&packet.flow.local, packet.flow.local_port)))
		return pass(packet.quoted ? PASSED_ICMP : packet.fragment ? PASSED_FRAGMENT : PASSED_TCP);
	if (!is_for_station(ctx))
		return pass(PASSED_OTHER_STATION);
	/* No connection is opened with such a peer. */
	if (!known && is_martian(&packet.flow.remote))
		return drop(DROPPED_MARTIAN);
	if (packet.fragment) {
		if (!packet.later)
			note_fragment(&packet, 0);
		return steer(ctx, STEERED_FRAGMENT);
	}
	return steer(ctx, !known ? STEERED_LISTENER : packet.quoted ? STEERED_ICMP : STEERED_FLOW);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
