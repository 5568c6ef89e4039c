//! Locks in PostgreSQL without a library, and as the peer ShedLock has them. Both use prepared
//! statements, which the store does without for the sake of poolers.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lock_tests::postgres;
use tokio::{sync::Semaphore, time::sleep};
use tokio_postgres::{Client, Statement, types::ToSql};

use crate::subject::Subject;

/// The pause of a poller between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// The statements of a lock. Both take its name and a token.
struct Sql {
    table: &'static str,
    acquire: &'static str,
    release: &'static str,
}

const BARE: Sql = Sql {
    table: "create table if not exists bare (name text primary key, token bigint not null, until timestamptz not null)",
    acquire: "insert into bare values ($1, $2, now() + interval '30 s') on conflict do nothing",
    release: "delete from bare where name = $1 and token = $2",
};

const POLLER: Sql = Sql {
    table: "create table if not exists poller (name text primary key, token bigint not null, lock_until timestamptz not null)",
    acquire: "insert into poller values ($1, $2, now() + interval '30 s') on conflict (name) do update \
        set token = excluded.token, lock_until = excluded.lock_until where poller.lock_until <= now()",
    release: "update poller set lock_until = now() where name = $1 and token = $2",
};

struct Connection {
    client: Client,
    acquire: Statement,
    release: Statement,
}

impl Connection {
    async fn connect(url: &str, count: usize, sql: &Sql) -> Vec<Arc<Self>> {
        let mut connections = Vec::with_capacity(count);
        for _ in 0..count {
            let client = postgres::connect(url).await;
            client.batch_execute(sql.table).await.expect(VALID);
            connections.push(Arc::new(Self {
                acquire: client.prepare(sql.acquire).await.expect(VALID),
                release: client.prepare(sql.release).await.expect(VALID),
                client,
            }));
        }
        connections
    }

    /// Returns the number of rows.
    async fn execute(&self, statement: &Statement, name: &str, token: i64) -> u64 {
        let arguments: [&(dyn ToSql + Sync); 2] = [&name, &token];
        let count = self.client.execute(statement, &arguments).await;
        count.expect(VALID)
    }

    async fn acquire(&self, name: &str, token: i64) -> bool {
        self.execute(&self.acquire, name, token).await > 0
    }

    async fn release(&self, name: &str, token: i64) {
        let count = self.execute(&self.release, name, token).await;
        assert_eq!(count, 1, "the lock is held");
    }
}

const VALID: &str = "the statement is valid";

/// The connections of all tasks.
pub(super) struct Pool {
    connections: Mutex<Vec<Arc<Connection>>>,
    free: Semaphore,
}

/// How tasks share connections.
#[derive(Clone, Copy)]
pub(super) enum Sharing {
    /// A connection serves one call at a time, as in a pool. The way to use PostgreSQL.
    Lent,
    /// Calls are sent before the replies to earlier ones.
    Pipelined,
}

impl Pool {
    pub(super) async fn connect(url: &str, count: usize) -> Arc<Self> {
        Arc::new(Self {
            connections: Connection::connect(url, count, &BARE).await.into(),
            free: Semaphore::new(count),
        })
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        let connections = self.connections.lock();
        connections.unwrap_or_else(PoisonError::into_inner)
    }

    async fn call<T>(&self, sharing: Sharing, call: impl AsyncFnOnce(&Connection) -> T) -> T {
        match sharing {
            Sharing::Lent => {
                let _permit = self.free.acquire().await.expect("it is never closed");
                let connection = self.connections().pop();
                let connection = connection.expect("as many as there are permits");
                let reply = call(&connection).await;
                self.connections().push(connection);
                reply
            }
            Sharing::Pipelined => {
                let connection = {
                    let mut connections = self.connections();
                    connections.rotate_left(1);
                    connections[0].clone()
                };
                call(&connection).await
            }
        }
    }
}

/// The least that a lock may cost: a row that is inserted and deleted. There are no fencing tokens
/// and no wait queue, and nothing removes the row of a holder that has crashed.
pub(super) struct BareLock {
    pool: Arc<Pool>,
    sharing: Sharing,
    name: String,
}

impl BareLock {
    pub(super) fn new(pool: &Arc<Pool>, sharing: Sharing, name: String) -> Self {
        Self {
            pool: pool.clone(),
            sharing,
            name,
        }
    }
}

impl Subject for BareLock {
    type Guard = i64;

    async fn acquire(&self) -> i64 {
        let token = rand::random();
        let acquire = async |it: &Connection| it.acquire(&self.name, token).await;
        assert!(
            self.pool.call(self.sharing, acquire).await,
            "no other task uses this key"
        );
        token
    }

    async fn release(&self, token: i64) {
        let release = async |it: &Connection| it.release(&self.name, token).await;
        self.pool.call(self.sharing, release).await;
    }
}

/// A row with the end of its lease. Waiters try again after a pause.
pub(super) struct Poller {
    connection: Arc<Connection>,
    name: String,
}

impl Poller {
    pub(super) async fn connect(url: &str, count: usize) -> Vec<Self> {
        let connections = Connection::connect(url, count, &POLLER).await.into_iter();
        let poller = |connection| Self {
            connection,
            name: String::new(),
        };
        connections.map(poller).collect()
    }

    /// The same client for a lock.
    pub(super) fn of(&self, name: String) -> Self {
        Self {
            connection: self.connection.clone(),
            name,
        }
    }
}

impl Subject for Poller {
    type Guard = i64;

    async fn acquire(&self) -> i64 {
        let token = rand::random();
        while !self.connection.acquire(&self.name, token).await {
            sleep(PAUSE).await;
        }
        token
    }

    async fn release(&self, token: i64) {
        self.connection.release(&self.name, token).await;
    }
}
