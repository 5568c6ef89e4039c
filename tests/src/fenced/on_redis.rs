//! A resource in Redis, shared by the processes that open it under the same name.

use std::{collections::HashMap, fmt, num::NonZeroU32, process, sync::LazyLock};

use redis::{AsyncCommands, Script, aio::MultiplexedConnection};
use tokio::task::yield_now;

use super::{Report, Stale};
use crate::redis_server::connect;

/// KEYS: the counts, the visitors inside. ARGV: "alone" or "readers", room, the visitor, the token
/// ("" for a reader).
/// Returns the largest token seen when the given one is smaller, else nothing.
static ENTER: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        r"
local inside = { alone = 0, readers = 0 }
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
    local kind = string.match(all[i], '^%a+')
    inside[kind] = inside[kind] + tonumber(all[i + 1])
end
local kind, room = ARGV[1], tonumber(ARGV[2])
if (kind == 'alone' and (inside.alone >= room or inside.readers > 0)) or (kind == 'readers' and inside.alone > 0) then
    redis.call('HINCRBY', KEYS[1], 'overlaps', 1)
end
if ARGV[4] ~= '' then
    local seen = redis.call('HGET', KEYS[1], 'seen')
    if seen and tonumber(ARGV[4]) < tonumber(seen) then
        redis.call('HINCRBY', KEYS[1], 'violations', 1)
        return seen
    end
    redis.call('HSET', KEYS[1], 'seen', ARGV[4])
end
redis.call('HINCRBY', KEYS[2], kind .. ':' .. ARGV[3], 1)
local now = inside.alone + inside.readers + 1
if now > tonumber(redis.call('HGET', KEYS[1], 'peak') or '0') then
    redis.call('HSET', KEYS[1], 'peak', now)
end
return false
",
    )
});

/// KEYS: the counts. ARGV: the token, the number. Returns as [`ENTER`] does.
static WRITE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        r"
local seen = redis.call('HGET', KEYS[1], 'seen')
if seen and tonumber(ARGV[1]) < tonumber(seen) then
    redis.call('HINCRBY', KEYS[1], 'violations', 1)
    return seen
end
local value = tonumber(redis.call('HGET', KEYS[1], 'value') or '0')
if tonumber(ARGV[2]) ~= value + 1 then
    redis.call('HINCRBY', KEYS[1], 'lost_updates', 1)
end
redis.call('HINCRBY', KEYS[1], 'writes', 1)
redis.call('HSET', KEYS[1], 'seen', ARGV[1], 'value', ARGV[2])
return false
",
    )
});

/// A resource in Redis, shared by all processes that open it under one name. Tokens are compared as
/// Lua numbers, exact up to 2^53. The methods take a `FencingToken` or a plain number.
///
/// Every call panics when its Redis fails: use a server that the test does not disturb.
#[derive(Clone)]
pub struct RedisFencedResource {
    connection: MultiplexedConnection,
    counts: String,
    inside: String,
    visitor: String,
    room: u32,
}

impl RedisFencedResource {
    /// Opens the resource `name` on the Redis at `url`, for an exclusive lock: one visitor inside
    /// at a time.
    pub async fn open(url: &str, name: &str) -> Self {
        Self::open_with_room(url, name, NonZeroU32::MIN).await
    }

    /// The same for permits: `room` visitors inside at a time.
    pub async fn open_with_room(url: &str, name: &str, room: NonZeroU32) -> Self {
        let connection = connect(url)
            .await
            .expect("the fenced resource needs its Redis");
        let (counts, inside) = (format!("{{{name}}}:counts"), format!("{{{name}}}:inside"));
        Self {
            connection,
            counts,
            inside,
            visitor: process::id().to_string(),
            room: room.get(),
        }
    }

    /// Enters as a visitor that must be alone (or one of `room`), until [`exit`](Self::exit).
    ///
    /// # Errors
    /// When a larger token was seen; the entry is counted as a violation and as the overlap it
    /// would have been.
    pub async fn enter(&self, fence: impl Into<u64>) -> Result<(), Stale> {
        let fence = fence.into();
        self.enter_as("alone", &fence.to_string())
            .await
            .map_or(Ok(()), |seen| {
                Err(Stale {
                    presented: fence,
                    seen,
                })
            })
    }

    /// Leaves again.
    pub async fn exit(&self) {
        self.exit_as("alone").await;
    }

    /// Enters as one of any number of readers, of which none may meet a visitor that must be alone.
    pub async fn enter_reader(&self) {
        self.enter_as("readers", "").await;
    }

    /// Leaves again.
    pub async fn exit_reader(&self) {
        self.exit_as("readers").await;
    }

    /// Removes the visits of the process `pid`, which was killed and cannot leave itself.
    pub async fn forget(&self, pid: u32) {
        let fields = [format!("alone:{pid}"), format!("readers:{pid}")];
        let _: () = self
            .connection
            .clone()
            .hdel(&self.inside, &fields)
            .await
            .expect("HDEL on the fenced resource");
    }

    /// The current number.
    pub async fn read(&self) -> u64 {
        let value: Option<u64> = self
            .connection
            .clone()
            .hget(&self.counts, "value")
            .await
            .expect("HGET on the fenced resource");
        value.unwrap_or(0)
    }

    /// Writes a new number: one more than the number read before.
    ///
    /// # Errors
    /// When a larger token was seen; the write is refused and counted as a violation.
    pub async fn write(&self, fence: impl Into<u64>, value: u64) -> Result<(), Stale> {
        let fence = fence.into();
        let mut write = WRITE.key(&self.counts);
        let seen = write
            .arg(fence)
            .arg(value)
            .invoke_async(&mut self.connection.clone())
            .await;
        let seen: Option<u64> = seen.expect("a write to the fenced resource");
        seen.map_or(Ok(()), |seen| {
            Err(Stale {
                presented: fence,
                seen,
            })
        })
    }

    /// Runs a whole critical section: enter, read, let the other tasks run, write, leave.
    ///
    /// # Errors
    /// When a larger token was seen, at the entry or at the write.
    pub async fn increment(&self, fence: impl Into<u64>) -> Result<(), Stale> {
        let fence = fence.into();
        self.enter(fence).await?;
        let value = self.read().await;
        yield_now().await;
        let written = self.write(fence, value + 1).await;
        self.exit().await;
        written
    }

    /// The counts so far, of all processes.
    pub async fn report(&self) -> Report {
        let counts: HashMap<String, u64> = self
            .connection
            .clone()
            .hgetall(&self.counts)
            .await
            .expect("HGETALL on the fenced resource");
        let count = |name| counts.get(name).copied().unwrap_or(0);
        Report {
            value: count("value"),
            writes: count("writes"),
            violations: count("violations"),
            overlaps: count("overlaps"),
            lost_updates: count("lost_updates"),
            peak: count("peak"),
        }
    }

    async fn enter_as(&self, kind: &str, fence: &str) -> Option<u64> {
        let mut enter = ENTER.key(&self.counts);
        enter
            .key(&self.inside)
            .arg(kind)
            .arg(self.room)
            .arg(&self.visitor)
            .arg(fence);
        enter
            .invoke_async(&mut self.connection.clone())
            .await
            .expect("an entry into the fenced resource")
    }

    async fn exit_as(&self, kind: &str) {
        let field = format!("{kind}:{}", self.visitor);
        let _: i64 = self
            .connection
            .clone()
            .hincr(&self.inside, field, -1)
            .await
            .expect("HINCRBY on the fenced resource");
    }
}

impl fmt::Debug for RedisFencedResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisFencedResource")
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}
