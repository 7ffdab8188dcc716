"""Which replica HAProxy asks: the one that is predicted to be done first.

How many questions a replica has does not tell: a batch that has just begun has as many as one about to end, one GPU may
be twice as fast as another, and a replica that refuses all has the fewest. So replicas say how long they take, when
HAProxy asks them itself (`endpoint.load`). Between two replies it adds what it sends. Who asks for little does not wait
for who asks for much (`workers.queue`), only for what he asks himself: so that is counted too, for each.
"""

ASKED_S = 0.05
"""So often one replica is asked, in turn: each of two ten times a second, each of twenty once. Half as often it was of
no use beside a flood.
"""
SILENT_S = 0.5
"""One that has been to answer for so long is passed by; if all have, HAProxy chooses as if none of this were there."""

AGAIN_S = 1.0
"""Until one is asked again that did not say: it is silent, has just failed, or has no generator (`split`). And until
any is while none has anything to do and nothing comes: whoever gets the next question is free.
"""

ALONE = 2
"""So many times as long as one of a batch takes a question of who asks for little: it is one alone."""

MOST_CALLERS = 1000
"""Whose questions are told apart. After one more it begins anew."""

CHOSEN = "    use-server %[lua.soonest] unless { var(proc.drawn) -m bool }"
"""Of a backend. A replica that is down, or has no name, is not used. Who measures may tell HAProxy to draw two."""

NOT_TOLD = "    http-request deny deny_status 404 if { path,url_dec /-/load }\n"
"""Of HTTP's frontend: how busy replicas are is nothing for callers."""

SOONEST = "soonest.lua"
SOONEST_LUA = (
    f"local ASKED_S, SILENT_S, AGAIN_S = {ASKED_S}, {SILENT_S}, {AGAIN_S}\n"
    f"local ALONE, MOST_CALLERS = {ALONE}, {MOST_CALLERS}\n"
    + """\
local known, n_asked = {}, 0  -- by the name of a replica, which is the same over HTTP and gRPC
local sent = 0  -- when a question came last
local callers, n_callers = {}, 0  -- until when replicas are busy with what each has asked

local function seconds()
  local now = core.now()
  return now.sec + now.usec / 1000000
end

local function is_idle()
  local now = seconds()
  for _, it in pairs(known) do
    if it and it.due > now then return false end
  end
  return now - sent > AGAIN_S
end

-- Over a connection that is kept: to open one costs a replica more than to answer.
local function ask(connection, address)
  local size = 0
  local line = connection:send("GET /-/load HTTP/1.1\\r\\nHost: " .. address .. "\\r\\n\\r\\n") and "sent"
  while line and line:match("%S") do
    line = connection:receive("*l")
    size = tonumber((line or ""):lower():match("^content%-length: *(%d+)")) or size
  end
  local left, each = (line and size > 0 and connection:receive(size) or ""):match("^(%d+%.%d+) (%d+%.%d+)$")
  return left and {heard = seconds(), due = seconds() + left, each = tonumber(each)}
end

local function follow(name, address)
  local connection
  while core.get_info().Stopping == 0 do
    if not known[name] then
      connection = core.tcp()
      connection:settimeout(SILENT_S)
      connection:connect(address)
    end
    known[name] = ask(connection, address)
    if not known[name] then connection:close() end
    local asked = seconds()
    repeat
      core.msleep(math.ceil(1000 * ASKED_S * n_asked))
    until seconds() - asked > AGAIN_S or known[name] and not is_idle()
  end
end

for _, replica in ipairs(table.pack(...)) do
  local name, address = replica:match("^(.*)=(.*)$")
  n_asked = n_asked + 1
  core.register_task(function() follow(name, address) end)
end

local function of_caller(txn)
  local key = ""
  for _, header in ipairs({"authorization", "x-api-key", "x-caller"}) do key = key .. " " .. txn.sf:req_hdr(header) end
  key = txn.sc:xxh3(key)
  if not callers[key] then
    if n_callers == MOST_CALLERS then callers, n_callers = {}, 0 end
    callers[key], n_callers = {}, n_callers + 1
  end
  return callers[key]
end

core.register_fetches("soonest", function(txn)
  local now, backend, found, least = seconds(), txn.f:be_name(), "", math.huge
  local his = of_caller(txn)
  for name, it in pairs(known) do
    local is_fresh = it and now - it.heard < AGAIN_S + SILENT_S + ASKED_S * n_asked
    if is_fresh and txn.f:srv_is_up(backend .. "/" .. name) == 1 then
      local all, own = math.max(it.due - now, 0), math.max((his[name] or 0) - now, 0) + ALONE * it.each
      local left = math.min(all, own) + all / 100 + math.random() / 1000
      if left < least then found, least = name, left end
    end
  end
  local it = known[found]
  sent = now
  if it then
    it.due = math.max(it.due, now) + it.each
    his[found] = math.max(his[found] or 0, now) + ALONE * it.each
  end
  return found
end)
"""
)
