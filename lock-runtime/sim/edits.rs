//! The rules of the scripts, each broken in turn by a change of the text that is sent to Redis: the
//! simulator must find the violation that the rule prevents.
//!
//! Some rules do not show here, as another one makes up for them. Waiters poll, so a queue that a
//! release, a conversion or an abandonment does not advance, and a message that is not sent, cost
//! time only. A client confirms the grants of messages, so the number in one does not matter. The
//! tokens of a single server follow its clock, which the time between two grants advances beyond
//! the counter and the numbers that a grant reserves. The order of the queue is a promise only
//! among waiters that go on to wait.

use super::{
    Broken::{Script, ScriptOfMajority},
    checker::Wrong,
    explore::found,
};

found! {
    // Fencing tokens.
    found_script_that_draws_a_number_twice: Script(
        "local number = math.max(last + 1, base)\n  redis",
        "local number = math.max(last, 1)\n  redis",
    ) => Fence,
    found_script_whose_numbers_do_not_follow_the_clock: Script(
        "local number = draw(request.fence, request.counter, request.reserved)\n    hold(request",
        "local number = request.counter + 1\n    hold(request",
    ) => Fence,
    found_reader_whose_number_is_confirmed: Script(
        "if mode == 'exclusive' and last > 0",
        "if last > 0",
    ) => Fence,
    // The right to change a lock.
    found_release_of_any_holder: Script(
        "elseif holder == member then\n  reply",
        "elseif type(holder) == 'string' then\n  reply",
    ) => NotHeld,
    found_abandonment_of_any_holder: Script(
        "if kind == 'string' and holder == member then\n    redis",
        "if kind == 'string' then\n    redis",
    ) => NotHeld,
    found_renewal_of_any_holder: Script(
        "if holder ~= member then\n  return -1",
        "if not holder then\n  return -1",
    ) => NotHeld,
    found_pass_of_any_holder: Script(
        "if holder ~= member then\n  if kind",
        "if not holder then\n  if kind",
    ) => Orphan,
    found_share_whose_release_ends_all: Script(
        "redis.call('ZREM', KEYS[1], ARGV[1])",
        "redis.call('DEL', KEYS[1])",
    ) => NotHeld,
    found_renewal_that_creates_a_share: Script(
        "if standing ~= 'held' then\n  return -1\nend",
        "ttl = ttl or 0\nif standing ~= 'held' and standing ~= 'free' then\n  return -1\nend",
    ) => Orphan,
    found_renewal_that_shortens: Script("elseif lease <= ttl then", "elseif lease < 0 then") => NotHeld,
    // Admission.
    found_acquire_that_replaces_the_holder: Script(
        "local holder = redis.pcall('GET', KEYS[1])\n  if (not holder",
        "local holder = nil\n  if (not holder",
    ) => NotHeld,
    found_writer_that_enters_beside_readers: Script(
        "  if mode == 'exclusive' then\n    return 'busy', expiry - now, kind",
        "  if mode == 'exclusive' then\n    return 'free', nil, kind",
    ) => NotHeld,
    found_permit_too_many: Script("count >= permits", "count > permits") => TwoHolders,
    found_acquire_that_forgets_the_standing_holder: Script(
        "  if standing == 'held' then\n    request.ttl = ttl\n  end",
        "  if standing == 'held' then\n    standing = 'free'\n  end",
    ) => NotHeld,
    found_script_without_a_deadline: Script("tonumber(ARGV[1])", "1e18") => Orphan,
    // The end of a lock.
    found_lock_without_an_end: Script(
        "redis.call('SET', lock, member, 'PX', lease)",
        "redis.call('SET', lock, member)",
    ) => Orphan,
    found_set_that_ends_with_its_latest_holder: Script(
        "whole(math.max(last, expiry))",
        "whole(expiry)",
    ) => Refusal,
    found_set_that_outlasts_its_holders: Script(
        "local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')\n  if last[2]",
        "local last = {}\n  if last[2]",
    ) => Refusal,
    found_set_that_outlasts_a_free_release: Script(
        "if longest[#longest - 1] == ARGV[1] and #longest == 4 then",
        "if false then",
    ) => Refusal,
    found_share_that_is_released_in_foreign_data: Script(
        "type(expiry) == 'string' and tonumber(expiry) > now",
        "true",
    ) => Orphan,
    found_abandonment_that_leaves_the_lock: Script(
        "    redis.call('DEL', lock)\n    reply, kind = {'released'}, 'none'",
        "    reply = {'released'}",
    ) => Orphan,
    found_conversion_that_leaves_a_gap: Script(
        "join(lock, member, now + ttl)\n    kind = 'set'",
        "kind = 'none'",
    ) => NotHeld,
    // Reservations.
    found_writer_without_a_reservation: Script(
        "if keep > 0 then\n    redis.call('SET', lock",
        "if false then\n    redis.call('SET', lock",
    ) => TooEarly,
    found_share_without_a_reservation: Script(
        "if keep > 0 then\n      join(lock, kept",
        "if false then\n      join(lock, kept",
    ) => TooEarly,
    found_reservation_that_a_waiter_passes: Script(
        "if not kept then\n",
        "if not ARGV[3] then\n",
    ) => TooEarly,
    found_reservation_under_the_name_of_the_holder: Script(
        "redis.call('SET', lock, member .. '.kept', 'PX', keep)",
        "redis.call('SET', lock, member, 'PX', keep)",
    ) => Orphan,
    // Results (rule 43).
    found_result_that_is_not_kept: Script(
        "redis.call('SET', lock, done(member, timestamp(), ARGV[3], ARGV[4]), 'PX', keep)",
        "redis.call('DEL', lock)",
    ) => Forgotten,
    found_result_that_ends_early: Script(
        "redis.call('SET', lock, done(member, timestamp(), ARGV[3], ARGV[4]), 'PX', keep)",
        "redis.call('SET', lock, done(member, timestamp(), ARGV[3], ARGV[4]), 'PX', 1)",
    ) => Forgotten,
    found_result_of_another_than_the_holder: Script(
        "elseif holder == member then\n  reply = {'released'}",
        "elseif ARGV[3] or holder == member then\n  reply = {'released'}",
    ) => NotHeld,
    found_lock_that_is_done_and_granted: Script("return 'done', nil, kind", "return 'free', nil, kind") => Forgotten,
    // The queue.
    found_abandonment_that_leaves_the_entry: Script(
        "  if line.own then\n    leave(line, line.own, member)\n  end\n  line.frees",
        "  line.frees",
    ) => Orphan,
    found_queue_that_only_a_release_advances: Script(
        "(kind == 'none' or kind == 'set') then\n    advance(line, lock, fence, kind, member)",
        "false then\n    advance(line, lock, fence, kind, member)",
    ) => Stuck,
    found_queue_whose_latest_waiter_is_first: Script(
        "local place = line.first\n  while",
        "local place = line.last\n  while",
    ) => Stuck,
    found_queue_that_loses_its_end: Script(
        "line.last = place - 1",
        "line.last = place - 2",
    ) => Stuck,
    found_entry_that_is_granted_twice: Script(
        "hold(lock, mode, member, lease)\n          leave(line, place, member)",
        "hold(lock, mode, member, lease)",
    ) => Orphan,
    found_grant_that_is_not_written: Script("          hold(lock, mode, member, lease)\n", "") => NotHeld,
    found_poll_that_promises_more: Script(
        "{'granted', confirm(fence, latest, mode), ttl, 0}",
        "{'granted', confirm(fence, latest, mode), ttl + 3000, 0}",
    ) => NotHeld,
    // A majority of servers.
    found_number_that_ignores_the_counter: ScriptOfMajority(
        "local number = math.max(last + 1, base)\n  redis",
        "local number = base\n  redis",
    ) => Fence,
    found_number_of_a_free_lock_that_ignores_the_counter: ScriptOfMajority(
        "math.max(last + 1, base), tonumber(ARGV[5])",
        "base, tonumber(ARGV[5])",
    ) => Fence,
    found_number_that_is_not_raised: ScriptOfMajority(
        "redis.call('SET', KEYS[1], whole(number), 'EX', 86400)",
        "",
    ) => Fence,
    found_raise_that_lowers_the_counter: ScriptOfMajority("if latest >= number then", "if false then") => Fence,
}
