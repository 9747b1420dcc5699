// SPDX-License-Identifier: (MIT OR GPL-2.0-only)
//
// The switch: an interface that many processes share. Each client has a veth pair; its AF_XDP socket is bound to the far
// end, the helper holds the near end. Three programs:
//
//   xwarp_uplink  on the interface: frames to a port that a client owns go into the client's pair, others to the kernel
//   xwarp_port    on the near end: frames that a client sent, from an address and a port that it owns, go into the pair
//                 of the client that owns the destination, or out of the interface; all others are dropped
//   xwarp_to_xsk  on the far end: every frame goes to the client's socket
//
// A port that a client has reserved belongs to this client alone, with all connections and strays. The kernel socket
// that reserves it keeps everybody else away. User space (`Switch` in switch.rs) fills the maps and owns them.

#define PROGRAM_REASONS (REASONS + 6)
#include "frame.h"

/* What the programs did with the other frames, after `enum reason`. */
enum switched {
	TO_CLIENT = REASONS,
	TO_LOCAL_CLIENT,
	TO_WIRE,
	DROPPED_FOREIGN, /* the client does not own the source, or it is no TCP segment */
	DROPPED_NO_OWNER, /* to an own address, at a port without owner */
	DROPPED_NO_SOCKET,
};

/* Key of the interface itself in `clients`; slots of clients begin with 1. */
#define UPLINK 0

/* The slot of the client that owns a port. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct port_key);
	__type(value, __u32);
} owners SEC(".maps");

/* By slot: the near end of the client's pair. */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} clients SEC(".maps");

/* By interface index of either end, all in one network namespace: the slot of the client. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
} slots SEC(".maps");

/* By slot: the socket that is bound to the far end. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

struct mac {
	__u8 octets[ETH_ALEN];
};

/* The interface's Ethernet address, the only source of frames. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mac);
} source SEC(".maps");

static __always_inline int drop(__u32 reason)
{
	count(reason);
	return XDP_DROP;
}

static __always_inline int redirect(__u32 slot, __u32 reason)
{
	count(reason);
	return bpf_redirect_map(&clients, slot, XDP_DROP);
}

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

SEC("xdp")
int xwarp_uplink(struct xdp_md *ctx)
{
	struct packet packet = {};
	int reason = parse(ctx, &packet);
	__u32 *slot;

	if (reason != PARSED)
		return pass(reason);
	slot = owner(&packet.flow.local, packet.flow.local_port);
	if (!slot || !bpf_map_lookup_elem(&addresses, &packet.flow.local))
		return pass(packet.quoted ? PASSED_ICMP : PASSED_TCP);
	return redirect(*slot, TO_CLIENT);
}

static __always_inline bool has_our_source(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	__u32 first = 0;
	struct mac *mac = bpf_map_lookup_elem(&source, &first);

	if (!mac || (void *)(eth + 1) > end)
		return false;
#pragma unroll
	for (int i = 0; i < ETH_ALEN; i++)
		if (eth->h_source[i] != mac->octets[i])
			return false;
	return true;
}

SEC("xdp")
int xwarp_port(struct xdp_md *ctx)
{
	__u32 ingress = ctx->ingress_ifindex;
	__u32 *slot = bpf_map_lookup_elem(&slots, &ingress);
	struct packet packet = {};
	__u32 *from, *to;

	/* `local` is the destination of a frame that a client sent, and `remote` the client's own end. */
	if (!slot || !has_our_source(ctx) || parse(ctx, &packet) != PARSED || packet.quoted)
		return drop(DROPPED_FOREIGN);
	from = owner(&packet.flow.remote, packet.flow.remote_port);
	if (!from || *from != *slot || !bpf_map_lookup_elem(&addresses, &packet.flow.remote))
		return drop(DROPPED_FOREIGN);
	if (!bpf_map_lookup_elem(&addresses, &packet.flow.local))
		return redirect(UPLINK, TO_WIRE);
	to = owner(&packet.flow.local, packet.flow.local_port);
	if (!to)
		return drop(DROPPED_NO_OWNER);
	return redirect(*to, TO_LOCAL_CLIENT);
}

SEC("xdp")
int xwarp_to_xsk(struct xdp_md *ctx)
{
	__u32 ingress = ctx->ingress_ifindex;
	__u32 *slot = bpf_map_lookup_elem(&slots, &ingress);
	int action;

	if (!slot)
		return drop(DROPPED_NO_SOCKET);
	action = bpf_redirect_map(&sockets, *slot, XDP_DROP);
	if (action != XDP_REDIRECT)
		count(DROPPED_NO_SOCKET);
	return action;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
