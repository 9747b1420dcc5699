// SPDX-License-Identifier: (MIT OR GPL-2.0-only)
//
// Parsing shared by the programs: from an Ethernet frame to the addresses and ports of a TCP segment, or of the
// segment that an ICMP error quotes.
//
// Packet memory is read at constant offsets only, at which frames without tags and IP options have their headers. Headers
// at a variable offset (behind VLAN tags, IP options, extension headers, in an ICMP message) are copied to the stack by bpf_xdp_load_bytes
// (Linux 5.18). Adding a register to a packet pointer would need CAP_PERFMON: the verifier rejects it for a process that
// has only CAP_BPF and CAP_NET_ADMIN.

#pragma once

#include <stdbool.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* What a program gets: an XDP frame, or, with FRAMES_ARE_SKBS, a socket buffer of tc. */
#ifdef FRAMES_ARE_SKBS
typedef struct __sk_buff frame_context;
#define load_bytes bpf_skb_load_bytes
#else
typedef struct xdp_md frame_context;
#define load_bytes bpf_xdp_load_bytes
#endif

#define MAX_VLANS 2
#define VLAN_ID_MASK 0x0fff
#define IP_FRAGMENT_MASK 0x3fff /* more fragments, and the offset */
#define IP_OFFSET_MASK 0x1fff
#define IP6_OFFSET_MASK 0xfff8
#define IP6_MORE_FRAGMENTS 0x0001
/* Largest number of headers between IP and TCP. */
#define MAX_EXTENSIONS 8
/* Bytes of an ICMP message before the packet that it quotes (RFC 792, RFC 4443 section 3). */
#define ICMP_HEADER_BYTES 8

enum icmp_v4_type { ICMP_UNREACHABLE = 3, ICMP_TIME_EXCEEDED = 11, ICMP_PARAMETER = 12 };
enum icmp_v6_type { ICMP6_UNREACHABLE = 1, ICMP6_PARAMETER = 4 }; /* 2: too big, 3: time exceeded */

/* Why a frame is none of ours, or is not accepted; in the order of the counters in counters.rs, before those of each program. */
enum reason {
	PASSED_NOT_UNICAST,
	PASSED_NOT_IP,
	PASSED_VLAN,
	PASSED_FRAGMENT,
	PASSED_NOT_TCP,
	PASSED_ICMP,
	PASSED_TCP,
	PASSED_TRUNCATED,
	PASSED_MAPPED,
	PASSED_OTHER_STATION,
	DROPPED_MARTIAN,
	DROPPED_HEADERS,
	REASONS,
};

/* An address in network byte order with the version of its IP packet, 4 or 6: addresses of the two
 * families never compare equal. An IPv4 address fills the first four octets; the others are zero. */
struct address {
	__u8 octets[16];
	__u16 version;
};

struct flow_key {
	struct address local;
	struct address remote;
	__be16 local_port;
	__be16 remote_port;
};

/* A port of an address. The wildcard address is all zero, version included. */
struct port_key {
	struct address local;
	__be16 port;
};

/* A TCP segment from `remote` to `local`, or an ICMP error that quotes a segment from `local` to `remote`. */
struct packet {
	struct flow_key flow;
	bool syn; /* opens a connection */
	bool quoted;
	bool fragment; /* of a segment: `syn` is unknown */
	bool later; /* a fragment after the first, without ports */
	__be32 id; /* of the packet of a fragment */
	bool unusual; /* IP options, extension headers, a TTL of 0, or a tag that carries a priority only */
};

/* The interface's own addresses: a wildcard port is that of these, and not of addresses that this host only
 * forwards to. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct address);
	__type(value, __u8);
} addresses SEC(".maps");

struct mac {
	__u8 octets[ETH_ALEN];
};

/* The interface's Ethernet address. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mac);
} source SEC(".maps");

/* The packets of which a first fragment was ours, and the slot of the client that owns it: their later fragments are found by it.
 * Those that overtake the first one pass, and the kernel does not complete the packet. */
struct fragment_key {
	struct address local;
	struct address remote;
	__be32 id;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct fragment_key);
	__type(value, __u32);
} fragments SEC(".maps");

#define PARSED (-1)

struct vlan_tag {
	__be16 tci;
	__be16 next_proto;
};

/* VLAN ids of our frames, outermost first, in host order. */
const volatile __u16 vlan_count = 0;
const volatile __u16 vlan_ids[MAX_VLANS] = {};

/* Counts by reason: of `enum reason`, then of the program that includes this file, PROGRAM_REASONS in all. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PROGRAM_REASONS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

static __always_inline void count(__u32 reason)
{
	__u64 *counter = bpf_map_lookup_elem(&counters, &reason);

	if (counter)
		(*counter)++;
}

/* Lets the kernel, or the next program of tc, have the frame. */
static __always_inline int pass(__u32 reason)
{
	count(reason);
#ifdef FRAMES_ARE_SKBS
	return TC_ACT_UNSPEC;
#else
	return XDP_PASS;
#endif
}

/* Takes the frame from everybody. */
static __always_inline int drop(__u32 reason)
{
	count(reason);
#ifdef FRAMES_ARE_SKBS
	return TC_ACT_SHOT;
#else
	return XDP_DROP;
#endif
}

/* The action on a frame that is not parsed. */
static __always_inline int dismiss(__u32 reason)
{
	return reason == DROPPED_HEADERS ? drop(reason) : pass(reason);
}

/* Whether these are the octets of the interface's Ethernet address. */
static __always_inline bool is_station(const __u8 *octets)
{
	__u32 first = 0;
	struct mac *mac = bpf_map_lookup_elem(&source, &first);

	if (!mac)
		return false;
#pragma unroll
	for (int i = 0; i < ETH_ALEN; i++)
		if (octets[i] != mac->octets[i])
			return false;
	return true;
}

/* Whether a frame is for this station. In promiscuous mode others arrive, too, which the kernel ignores. */
static __always_inline bool is_for_station(frame_context *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	return (void *)(eth + 1) <= (void *)(long)ctx->data_end && is_station(eth->h_dest);
}

/* Whether an address may be that of one host: not this network's (0.0.0.0/8), the loopback's, multicast, reserved or
 * broadcast (RFC 1122 section 3.2.1.3), and not ::, ::1 or multicast (RFC 4291 section 2.4). */
static __always_inline bool is_unicast(const struct address *address)
{
	__u8 first = address->octets[0], any = 0;

	if (address->version == 4)
		return first != 0 && first != 127 && first < 224;
#pragma unroll
	for (int i = 0; i < 15; i++)
		any |= address->octets[i];
	return first != 0xff && any;
}

/* Whether nobody but this host, or no host at all, can have sent a packet from this address (RFC 1122 section 3.2.1.3). */
static __always_inline bool is_martian(const struct address *source_address)
{
	return !is_unicast(source_address) || bpf_map_lookup_elem(&addresses, source_address);
}

static __always_inline void copy_v4(struct address *to, __be32 from)
{
	__builtin_memcpy(to->octets, &from, 4);
	__builtin_memset(to->octets + 4, 0, 12);
	to->version = 4;
}

static __always_inline void copy_v6(struct address *to, const struct in6_addr *from)
{
	__builtin_memcpy(to->octets, from, 16);
	to->version = 6;
}

/* ::ffff:a.b.c.d stands for an IPv4 address inside a host and names no interface on the wire (RFC 4291
 * section 2.5.5.2). */
static __always_inline bool is_mapped(const struct in6_addr *ip)
{
	return !(ip->in6_u.u6_addr32[0] | ip->in6_u.u6_addr32[1]) &&
	       ip->in6_u.u6_addr32[2] == bpf_htonl(0xffff);
}

static __always_inline void copy_tcp(struct packet *packet, const struct tcphdr *tcp)
{
	packet->flow.local_port = tcp->dest;
	packet->flow.remote_port = tcp->source;
	packet->syn = tcp->syn && !tcp->ack;
}

static __always_inline void fragment_key_of(const struct packet *packet, struct fragment_key *key)
{
	key->local = packet->flow.local;
	key->remote = packet->flow.remote;
	key->id = packet->id;
}

/* Notes that the packet of a first fragment is for the client of `slot`. */
static __always_inline void note_fragment(const struct packet *packet, __u32 slot)
{
	struct fragment_key key = {};

	fragment_key_of(packet, &key);
	bpf_map_update_elem(&fragments, &key, &slot, BPF_ANY);
}

/* The slot of the client that has the first fragment of a packet; NULL if it was not ours. */
static __always_inline __u32 *fragment_owner(const struct packet *packet)
{
	struct fragment_key key = {};

	fragment_key_of(packet, &key);
	return bpf_map_lookup_elem(&fragments, &key);
}

/* A TCP segment. `packet` has the addresses; `offset` is that of the TCP header, of which a fragment may have the ports
 * only. */
static __always_inline int tcp_segment(frame_context *ctx, struct packet *packet, __u32 offset)
{
	struct tcphdr tcp;

	if (packet->fragment) {
		__be16 ports[2];

		if (load_bytes(ctx, offset, ports, sizeof(ports)))
			return PASSED_TRUNCATED;
		packet->flow.remote_port = ports[0];
		packet->flow.local_port = ports[1];
		return PARSED;
	}
	if (load_bytes(ctx, offset, &tcp, sizeof(tcp)))
		return PASSED_TRUNCATED;
	copy_tcp(packet, &tcp);
	return PARSED;
}

/* Parses a TCP segment behind an IPv4 header without options. ip_v4 does this too, for headers at any offset, but its two
 * calls take 70 ns a frame. */
static __always_inline bool plain_v4(const struct iphdr *ip, const void *end, struct packet *packet)
{
	const struct tcphdr *tcp = (const void *)(ip + 1);

	if ((const void *)(tcp + 1) > end || ip->version != 4 || ip->ihl != sizeof(*ip) / 4 ||
	    ip->frag_off & bpf_htons(IP_FRAGMENT_MASK) || ip->protocol != IPPROTO_TCP)
		return false;
	packet->unusual = !ip->ttl;
	copy_v4(&packet->flow.local, ip->daddr);
	copy_v4(&packet->flow.remote, ip->saddr);
	copy_tcp(packet, tcp);
	return true;
}

/* The same for IPv6, in place of ip_v6. */
static __always_inline bool plain_v6(const struct ipv6hdr *ip, const void *end, struct packet *packet)
{
	const struct tcphdr *tcp = (const void *)(ip + 1);

	if ((const void *)(tcp + 1) > end || ip->version != 6 || ip->nexthdr != IPPROTO_TCP ||
	    is_mapped(&ip->saddr) || is_mapped(&ip->daddr))
		return false;
	packet->unusual = !ip->hop_limit;
	copy_v6(&packet->flow.local, &ip->daddr);
	copy_v6(&packet->flow.remote, &ip->saddr);
	copy_tcp(packet, tcp);
	return true;
}

/* An ICMP error that quotes a packet of ours, whose source port is the local one. RFC 792 guarantees eight
 * bytes of the quoted TCP header: both ports and the sequence number. */
static __always_inline int quoted_tcp(frame_context *ctx, struct packet *packet, __u32 offset)
{
	struct {
		__be16 source;
		__be16 dest;
		__be32 seq;
	} quoted;

	if (load_bytes(ctx, offset, &quoted, sizeof(quoted)))
		return PASSED_ICMP;
	packet->flow.local_port = quoted.source;
	packet->flow.remote_port = quoted.dest;
	packet->quoted = true;
	return PARSED;
}

/* RFC 792: eight bytes, then the quoted IP header and the first bytes of its payload. */
static __always_inline int icmp_v4(frame_context *ctx, struct packet *packet, __u32 offset)
{
	struct iphdr quoted;
	__u8 type;

	if (load_bytes(ctx, offset, &type, sizeof(type)))
		return PASSED_ICMP;
	if (type != ICMP_UNREACHABLE && type != ICMP_TIME_EXCEEDED && type != ICMP_PARAMETER)
		return PASSED_ICMP;
	offset += ICMP_HEADER_BYTES;
	if (load_bytes(ctx, offset, &quoted, sizeof(quoted)))
		return PASSED_ICMP;
	if (quoted.version != 4 || quoted.ihl < 5 || quoted.protocol != IPPROTO_TCP ||
	    quoted.frag_off & bpf_htons(IP_OFFSET_MASK))
		return PASSED_ICMP;
	copy_v4(&packet->flow.local, quoted.saddr);
	copy_v4(&packet->flow.remote, quoted.daddr);
	return quoted_tcp(ctx, packet, offset + quoted.ihl * 4);
}

/* RFC 4443 sections 2.1 and 3: eight bytes, then as much of the packet as fits. */
static __always_inline int icmp_v6(frame_context *ctx, struct packet *packet, __u32 offset)
{
	struct ipv6hdr quoted;
	__u8 type;

	if (load_bytes(ctx, offset, &type, sizeof(type)))
		return PASSED_ICMP;
	if (type < ICMP6_UNREACHABLE || type > ICMP6_PARAMETER)
		return PASSED_ICMP;
	offset += ICMP_HEADER_BYTES;
	if (load_bytes(ctx, offset, &quoted, sizeof(quoted)))
		return PASSED_ICMP;
	if (quoted.version != 6 || quoted.nexthdr != IPPROTO_TCP)
		return PASSED_ICMP;
	if (is_mapped(&quoted.saddr) || is_mapped(&quoted.daddr))
		return PASSED_MAPPED;
	copy_v6(&packet->flow.local, &quoted.saddr);
	copy_v6(&packet->flow.remote, &quoted.daddr);
	return quoted_tcp(ctx, packet, offset + sizeof(quoted));
}

static __always_inline bool is_extension(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING || protocol == IPPROTO_DSTOPTS ||
	       protocol == IPPROTO_FRAGMENT || protocol == IPPROTO_AH;
}

/* Moves `protocol` and `offset` behind the headers between IP and TCP, because the kernel's TCP, which would reset our
 * connections, gets what is behind them (RFC 8200 section 4, RFC 4302). User space decides what it accepts. A packet to us with
 * more headers than any host sends is not passed. */
static __always_inline int skip_extensions(frame_context *ctx, struct packet *packet, __u8 *protocol, __u32 *offset)
{
	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		struct {
			__u8 nexthdr, length;
			__be16 offset;
			__be32 id;
		} header;

		if (!is_extension(*protocol))
			return PARSED;
		packet->unusual = true;
		if (load_bytes(ctx, *offset, &header, sizeof(header)))
			return PASSED_TRUNCATED;
		if (*protocol == IPPROTO_FRAGMENT) {
			packet->id = header.id;
			packet->later = header.offset & bpf_htons(IP6_OFFSET_MASK);
			packet->fragment |= packet->later || header.offset & bpf_htons(IP6_MORE_FRAGMENTS);
			if (packet->later)
				return PARSED;
			*offset += 8;
		} else if (*protocol == IPPROTO_AH) {
			*offset += (header.length + 2) * 4;
		} else {
			*offset += (header.length + 1) * 8;
		}
		*protocol = header.nexthdr;
	}
	if (!is_extension(*protocol))
		return PARSED;
	return bpf_map_lookup_elem(&addresses, &packet->flow.local) ? DROPPED_HEADERS : PASSED_NOT_TCP;
}

static __always_inline int ip_v4(frame_context *ctx, struct packet *packet, __u32 offset)
{
	struct iphdr ip;
	__u8 protocol;
	int reason;

	if (load_bytes(ctx, offset, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return PASSED_TRUNCATED;
	packet->fragment = ip.frag_off & bpf_htons(IP_FRAGMENT_MASK);
	packet->later = ip.frag_off & bpf_htons(IP_OFFSET_MASK);
	packet->id = ip.id;
	packet->unusual |= ip.ihl != 5 || !ip.ttl;
	offset += ip.ihl * 4;
	protocol = ip.protocol;
	if (protocol == IPPROTO_ICMP && !packet->fragment)
		return icmp_v4(ctx, packet, offset);
	copy_v4(&packet->flow.local, ip.daddr);
	copy_v4(&packet->flow.remote, ip.saddr);
	/* The other headers are those of IPv6. */
	if (protocol == IPPROTO_AH && !packet->later) {
		reason = skip_extensions(ctx, packet, &protocol, &offset);
		if (reason != PARSED)
			return reason;
	}
	if (protocol != IPPROTO_TCP)
		return packet->fragment ? PASSED_FRAGMENT : PASSED_NOT_TCP;
	return packet->later ? PARSED : tcp_segment(ctx, packet, offset);
}

static __always_inline int ip_v6(frame_context *ctx, struct packet *packet, __u32 offset)
{
	struct ipv6hdr ip;
	__u8 protocol;
	int reason;

	if (load_bytes(ctx, offset, &ip, sizeof(ip)) || ip.version != 6)
		return PASSED_TRUNCATED;
	packet->unusual |= !ip.hop_limit;
	offset += sizeof(ip);
	protocol = ip.nexthdr;
	if (protocol == IPPROTO_ICMPV6)
		return icmp_v6(ctx, packet, offset);
	copy_v6(&packet->flow.local, &ip.daddr);
	copy_v6(&packet->flow.remote, &ip.saddr);
	reason = skip_extensions(ctx, packet, &protocol, &offset);
	if (reason != PARSED || packet->later)
		return reason;
	if (protocol != IPPROTO_TCP)
		return packet->fragment ? PASSED_FRAGMENT : PASSED_NOT_TCP;
	if (is_mapped(&ip.saddr) || is_mapped(&ip.daddr))
		return PASSED_MAPPED;
	return tcp_segment(ctx, packet, offset);
}

static __always_inline bool is_vlan(__be16 proto)
{
	return proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD);
}

/* Fills `packet`, which the caller has zeroed, and returns PARSED, or returns why the frame is none of ours. A function of its
 * own: within a larger one, clang spills the pointer to the packet to a place of the stack that it uses again later, which the
 * verifier takes for a leak unless the process has CAP_PERFMON. */
static __noinline int parse(frame_context *ctx, struct packet *packet)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	/* Read here, at constant offsets: see the top of the file. */
	const __u16 outer_id = vlan_ids[0], inner_id = vlan_ids[1];
	__u32 offset = sizeof(*eth);
	__u32 tags = 0;
	__be16 proto;

	if ((void *)(eth + 1) > end)
		return PASSED_TRUNCATED;
	if (eth->h_dest[0] & 1)
		return PASSED_NOT_UNICAST;
	proto = eth->h_proto;

#pragma unroll
	for (int i = 0; i < MAX_VLANS; i++) {
		struct vlan_tag tag;
		__u16 id;

		if (!is_vlan(proto))
			break;
		if (load_bytes(ctx, offset, &tag, sizeof(tag)))
			return PASSED_TRUNCATED;
		id = bpf_ntohs(tag.tci) & VLAN_ID_MASK;
		proto = tag.next_proto;
		offset += sizeof(tag);
		/* Id 0 carries a priority only (IEEE 802.1Q section 6.9.1): no VLAN. */
		if (id == 0) {
			packet->unusual = true;
			continue;
		}
		if (tags >= vlan_count || id != (tags == 0 ? outer_id : inner_id))
			return PASSED_VLAN;
		tags++;
	}
	if (tags != vlan_count || is_vlan(proto))
		return PASSED_VLAN;

	if (proto == bpf_htons(ETH_P_IP)) {
		if (offset == sizeof(*eth) && plain_v4((void *)(eth + 1), end, packet))
			return PARSED;
		return ip_v4(ctx, packet, offset);
	}
	if (proto == bpf_htons(ETH_P_IPV6)) {
		if (offset == sizeof(*eth) && plain_v6((void *)(eth + 1), end, packet))
			return PARSED;
		return ip_v6(ctx, packet, offset);
	}
	return PASSED_NOT_IP;
}
