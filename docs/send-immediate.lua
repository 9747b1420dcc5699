-- A Wireshark post-dissector for Sends with immediate data (docs/decisions/0031-send-with-immediate-data.md), which Wireshark shows as
-- RDMAP messages with an unknown opcode.
--
--   tshark -X lua_script:docs/send-immediate.lua -r capture.pcapng -Y sendimm
--
-- It reads what Wireshark's own dissectors of MPA and RDMAP have found: markers must be off.

local sendimm = Proto("sendimm", "Send with Immediate Data (xwarp)")

-- The reserved bits of MPA's flags, and RDMAP's opcode for experiments.
local OFFERED, AGREED, OPCODE = 1, 2, 15

local f = {
  offered = ProtoField.bool("sendimm.offered", "Offered"),
  agreed = ProtoField.bool("sendimm.agreed", "Agreed"),
  data = ProtoField.uint32("sendimm.data", "Immediate data", base.HEX),
  solicited = ProtoField.bool("sendimm.solicited", "Solicited event"),
  last = ProtoField.bool("sendimm.last", "Last segment of the message"),
}
sendimm.fields = f

local revision = Field.new("iwarp_mpa.rev")
local request = Field.new("iwarp_mpa.req")
local control = Field.new("iwarp_rdma.control_field")
local tagged = Field.new("iwarp_ddp.tagged_flag")

-- The bytes of a field and `count` after it, from the buffer in which Wireshark has found it.
local function bytes(field, from, count)
  local source = field.source
  if not source or source:len() < field.offset + from + count then return nil end
  return source(field.offset + from, count)
end

local function start_up(tree)
  for _, field in ipairs({ revision() }) do
    local flags = bytes(field, -1, 1)
    local bits = flags and flags:uint() % 16
    if field.value == 2 and request() and bits == OFFERED then
      tree:add(sendimm, flags, "Sends with immediate data are offered"):add(f.offered, flags, true)
    elseif field.value == 2 and not request() and bits == AGREED then
      tree:add(sendimm, flags, "Sends with immediate data are agreed on"):add(f.agreed, flags, true)
    end
  end
end

function sendimm.dissector(_, info, tree)
  start_up(tree)
  local is_tagged = { tagged() }
  for number, field in ipairs({ control() }) do
    local octet, word = bytes(field, 0, 1), bytes(field, 1, 4)
    if octet and word and octet:uint() % 16 == OPCODE and not (is_tagged[number] and is_tagged[number].value) then
      local sub = tree:add(sendimm, word, string.format("Send with Immediate Data, 0x%08x", word:uint()))
      sub:add(f.data, word)
      sub:add(f.solicited, octet, math.floor(octet:uint() / 16) % 2 == 1)
      local ddp = bytes(field, -1, 1)
      if ddp then sub:add(f.last, ddp, math.floor(ddp:uint() / 64) % 2 == 1) end
      info.cols.info:append(" Send with Immediate Data")
    end
  end
end

register_postdissector(sendimm)
