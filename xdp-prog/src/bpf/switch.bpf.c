// SPDX-License-Identifier: (MIT OR GPL-2.0-only)
//
// The switch: an interface that many processes share. Each client has a veth pair; its AF_XDP socket is bound to the far
// end, the helper holds the near end. Three programs:
//
//   xwarp_uplink  on the interface, or behind it (relay.bpf.c): frames to a port that a client owns go into the client's pair, others to the kernel
//   xwarp_port    on the near end: frames that a client sent, from an address and a port that it owns, go into the pair
//                 of the client that owns the destination, or out of the interface; all others are dropped, and those with IP
//                 options or extension headers, without TTL, to no single host or with other tags than the interface's, and
//                 those that the administrator does not allow (policy.h). A port of the interface's own addresses that no
//                 client owns is answered by a reset, as the kernel does
//   xwarp_to_xsk  on the far end: every frame goes to the client's socket
//
// A port that a client has reserved belongs to this client alone, with all connections and strays. The kernel socket
// that reserves it keeps everybody else away. User space (`Switch` in switch.rs) fills the maps and owns them.

#include "owners.h"
#include "policy.h"

/* Key of the interface itself in `clients`; slots of clients begin with 1. */
#define UPLINK 0

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

static __always_inline int redirect(__u32 slot, __u32 reason)
{
	count(reason);
	return bpf_redirect_map(&clients, slot, XDP_DROP);
}

SEC("xdp")
int xwarp_uplink(struct xdp_md *ctx)
{
	struct packet packet = {};
	int reason = parse(ctx, &packet);
	__u32 *slot;

	if (reason != PARSED)
		return dismiss(reason);
	slot = packet.later ? fragment_owner(&packet) : receiver(&packet);
	if (!slot)
		return pass(packet.quoted ? PASSED_ICMP : packet.fragment ? PASSED_FRAGMENT : PASSED_TCP);
	if (!is_for_station(ctx))
		return pass(PASSED_OTHER_STATION);
	if (!packet.quoted && is_martian(&packet.flow.remote))
		return drop(DROPPED_MARTIAN);
	if (!is_allowed_peer(&packet.flow.remote))
		return drop(DROPPED_PEER);
	if (packet.fragment && !packet.later)
		note_fragment(&packet, *slot);
	return redirect(*slot, TO_CLIENT);
}

static __always_inline bool has_our_source(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	return (void *)(eth + 1) <= (void *)(long)ctx->data_end && is_station(eth->h_source);
}

static __always_inline __u16 folded(__s64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (__u16)~sum;
}

/* The reset that answers a segment (RFC 9293 section 3.10.7.1), whose TCP header is at `offset`, in `length` bytes. */
static __always_inline void reset_of(const struct tcphdr *segment, __u32 length, struct tcphdr *reset)
{
	__u32 payload = length > segment->doff * 4 ? length - segment->doff * 4 : 0;

	reset->source = segment->dest;
	reset->dest = segment->source;
	reset->doff = sizeof(*reset) / 4;
	reset->rst = 1;
	if (segment->ack) {
		reset->seq = segment->ack_seq;
		return;
	}
	reset->ack = 1;
	reset->ack_seq = bpf_htonl(bpf_ntohl(segment->seq) + payload + segment->syn + segment->fin);
}

static __always_inline bool reset_v4(struct xdp_md *ctx, __u32 at, __u32 *end)
{
	struct {
		__be32 source, dest;
		__be16 protocol, length;
	} pseudo = { .protocol = bpf_htons(IPPROTO_TCP), .length = bpf_htons(sizeof(struct tcphdr)) };
	struct tcphdr segment, reset = {};
	struct iphdr ip;

	if (bpf_xdp_load_bytes(ctx, at, &ip, sizeof(ip)) || ip.ihl != sizeof(ip) / 4 ||
	    bpf_xdp_load_bytes(ctx, at + sizeof(ip), &segment, sizeof(segment)) || segment.rst)
		return false;
	reset_of(&segment, bpf_ntohs(ip.tot_len) - sizeof(ip), &reset);
	pseudo.source = ip.daddr;
	pseudo.dest = ip.saddr;
	ip.saddr = pseudo.source;
	ip.daddr = pseudo.dest;
	ip.tot_len = bpf_htons(sizeof(ip) + sizeof(reset));
	ip.ttl = 64;
	ip.check = 0;
	ip.check = folded(bpf_csum_diff(0, 0, (__be32 *)&ip, sizeof(ip), 0));
	reset.check = folded(bpf_csum_diff(0, 0, (__be32 *)&reset, sizeof(reset),
					   bpf_csum_diff(0, 0, (__be32 *)&pseudo, sizeof(pseudo), 0)));
	*end = at + sizeof(ip) + sizeof(reset);
	return !bpf_xdp_store_bytes(ctx, at, &ip, sizeof(ip)) &&
	       !bpf_xdp_store_bytes(ctx, at + sizeof(ip), &reset, sizeof(reset));
}

static __always_inline bool reset_v6(struct xdp_md *ctx, __u32 at, __u32 *end)
{
	struct {
		struct in6_addr source, dest;
		__be32 length, protocol;
	} pseudo = { .protocol = bpf_htonl(IPPROTO_TCP), .length = bpf_htonl(sizeof(struct tcphdr)) };
	struct tcphdr segment, reset = {};
	struct ipv6hdr ip;

	if (bpf_xdp_load_bytes(ctx, at, &ip, sizeof(ip)) ||
	    bpf_xdp_load_bytes(ctx, at + sizeof(ip), &segment, sizeof(segment)) || segment.rst)
		return false;
	reset_of(&segment, bpf_ntohs(ip.payload_len), &reset);
	pseudo.source = ip.daddr;
	pseudo.dest = ip.saddr;
	ip.saddr = pseudo.source;
	ip.daddr = pseudo.dest;
	ip.payload_len = bpf_htons(sizeof(reset));
	ip.hop_limit = 64;
	reset.check = folded(bpf_csum_diff(0, 0, (__be32 *)&reset, sizeof(reset),
					   bpf_csum_diff(0, 0, (__be32 *)&pseudo, sizeof(pseudo), 0)));
	*end = at + sizeof(ip) + sizeof(reset);
	return !bpf_xdp_store_bytes(ctx, at, &ip, sizeof(ip)) &&
	       !bpf_xdp_store_bytes(ctx, at + sizeof(ip), &reset, sizeof(reset));
}

/* Answers a segment to a port without owner by a reset. Its frame has the VLAN tags of the interface, and both Ethernet
 * addresses are the interface's. */
static __always_inline int refuse(struct xdp_md *ctx, const struct packet *packet)
{
	__u32 at = sizeof(struct ethhdr) + (__u32)vlan_count * sizeof(struct vlan_tag), end = 0;
	bool made = packet->flow.local.version == 4 ? reset_v4(ctx, at, &end) : reset_v6(ctx, at, &end);
	__u64 length = bpf_xdp_get_buff_len(ctx);

	if (!made || end > length || bpf_xdp_adjust_tail(ctx, (int)end - (int)length))
		return drop(DROPPED_NO_OWNER);
	count(REFUSED);
	return XDP_TX;
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
	/* Nothing that an ordinary sender does not send, and whose meaning others on the way may take differently. */
	if (packet.fragment || packet.unusual || !is_unicast(&packet.flow.local))
		return drop(DROPPED_FOREIGN);
	from = owner(&packet.flow.remote, packet.flow.remote_port);
	if (!from || *from != *slot || !bpf_map_lookup_elem(&addresses, &packet.flow.remote))
		return drop(DROPPED_FOREIGN);
	if (!bpf_map_lookup_elem(&addresses, &packet.flow.local)) {
		if (!is_allowed_peer(&packet.flow.local))
			return drop(DROPPED_PEER);
		if (!is_within_rate(ctx, *slot))
			return drop(DROPPED_RATE);
		return redirect(UPLINK, TO_WIRE);
	}
	to = owner(&packet.flow.local, packet.flow.local_port);
	if (!to)
		return refuse(ctx, &packet);
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
