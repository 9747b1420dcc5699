# Turns the constants of the kernel's siw into module parameters, for the second build. Each line
# names what it looks for; ci/vm/build checks afterwards that every parameter came into being.

# siw_main.c defines them.
s/^const bool \(zcopy_tx\|try_gso\|loopback_enabled\|mpa_crc_required\|mpa_crc_strict\|siw_tcp_nagle\|peer_to_peer\)\(.*\);/bool \1\2;\nmodule_param(\1, bool, 0644);/
s/^u_char mpa_version\(.*\);/u_char mpa_version\1;\nmodule_param(mpa_version, byte, 0644);/

# siw.h declares them.
s/^extern const bool /extern bool /

# siw_cm.c: which RTR messages an initiator in peer-to-peer mode offers.
s/^static __be16 rtr_type = .*/static bool rtr_write = true, rtr_read = true;\nmodule_param(rtr_write, bool, 0644);\nmodule_param(rtr_read, bool, 0644);/
s/|= rtr_type;/|= (rtr_write ? MPA_V2_RDMA_WRITE_RTR : 0) | (rtr_read ? MPA_V2_RDMA_READ_RTR : 0);/

# siw_cm.c: a first FPDU that arrived before siw took over the socket's callback is left lying
# there; calling the callback once when siw_accept() is done delivers it.
/^int siw_accept(.*)$/i\
static bool accept_kick = true;\
module_param(accept_kick, bool, 0644);\
\
static void kick(struct sock *sk)\
{\
	lock_sock(sk);\
	local_bh_disable();\
	if (!skb_queue_empty(&sk->sk_receive_queue))\
		sk->sk_data_ready(sk);\
	local_bh_enable();\
	release_sock(sk);\
}\

/^int siw_accept(/,/^}/{
	/^	siw_cep_set_free(cep);/i\
	if (accept_kick && cep->sock)\
		kick(cep->sock->sk);
}
