//! The recipes for fencing, executed by a SQL database and by Redis as the documentation shows
//! them.

mod redis;

use std::{fs, path::Path};

use lock_runtime::{FencingToken, LockClient};
use lock_tests::{
    Captured,
    place::{LONG, begun, in_time},
};
use rusqlite::{Connection, named_params};

const ORDER: u64 = 42;

/// The statements of the documentation that begin with `verb` and compare a fencing token.
fn statements(verb: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let parts = [
        "README.md",
        "lock-runtime/guide",
        "lock-runtime/src",
        "lock-macros/src",
        "lock-tower/src",
        "examples/src",
    ];
    let mut texts = Vec::new();
    parts
        .iter()
        .for_each(|part| read(&root.join(part), &mut texts));
    texts
        .iter()
        .flat_map(|text| statements_in(text, verb))
        .collect()
}

fn read(path: &Path, texts: &mut Vec<String>) {
    if path.is_dir() {
        fs::read_dir(path)
            .unwrap()
            .for_each(|entry| read(&entry.unwrap().path(), texts));
    } else if path
        .extension()
        .is_some_and(|extension| extension == "rs" || extension == "md")
    {
        texts.push(fs::read_to_string(path).unwrap());
    }
}

/// A statement goes on where the next line is indented deeper.
fn statements_in(text: &str, verb: &str) -> Vec<String> {
    let lines: Vec<_> = text
        .lines()
        .map(|line| line.trim_start_matches(['/', '!', ' ']))
        .collect();
    let indents: Vec<_> = text
        .lines()
        .zip(&lines)
        .map(|(line, code)| line.len() - code.len())
        .collect();
    let begins = |&index: &usize| lines[index].starts_with(verb);
    let statement = |index: usize| {
        let rest = (index + 1..lines.len()).take_while(|&next| indents[next] > indents[index]);
        [index]
            .into_iter()
            .chain(rest)
            .map(|index| lines[index])
            .collect::<Vec<_>>()
            .join(" ")
    };
    let statements = (0..lines.len()).filter(begins).map(statement);
    statements
        .filter(|statement| statement.contains("fence"))
        .collect()
}

#[test]
fn a_statement_is_found_in_comments_and_over_several_lines() {
    let text = "//! ```sql\n//! INSERT INTO a\n//!     (fence) VALUES (1)\n//! ```\n    // UPDATE a SET fence = 2\n";
    assert_eq!(
        statements_in(text, "INSERT "),
        ["INSERT INTO a (fence) VALUES (1)"]
    );
    assert_eq!(statements_in(text, "UPDATE "), ["UPDATE a SET fence = 2"]);
    assert!(statements_in("UPDATE a SET b = 1", "UPDATE ").is_empty());
}

/// A table of orders, with the column that the guide gives it.
struct Orders {
    database: Connection,
    statement: String,
}

impl Orders {
    fn new(statement: &str) -> Self {
        let guide = include_str!("../../../lock-runtime/guide/fencing/promise.md");
        let column = "fence BIGINT NOT NULL DEFAULT 0";
        assert!(guide.contains(column), "{column}");
        let database = Connection::open_in_memory().unwrap();
        database
            .execute_batch(&format!(
                "CREATE TABLE orders (id BIGINT PRIMARY KEY, state TEXT, {column})"
            ))
            .unwrap();
        Self {
            database,
            statement: statement.to_owned(),
        }
    }

    fn with_order(statement: &str) -> Self {
        let orders = Self::new(statement);
        orders
            .database
            .execute("INSERT INTO orders (id, state) VALUES (?1, 'new')", [ORDER])
            .unwrap();
        orders
    }

    /// Whether the write changed the row.
    fn pay(&self, fence: FencingToken) -> bool {
        let parameters = named_params! { ":id": ORDER, ":fence": fence.number() };
        let changed = self.database.execute(&self.statement, parameters).unwrap();
        assert!(changed <= 1, "{}", self.statement);
        changed == 1
    }

    fn fence(&self) -> u64 {
        self.database
            .query_row("SELECT fence FROM orders WHERE id = ?1", [ORDER], |row| {
                row.get(0)
            })
            .unwrap()
    }
}

/// Tables with an order, one for each statement that writes, and one without it for each that may
/// write the first row.
fn tables() -> Vec<Orders> {
    let (updates, inserts) = (statements("UPDATE "), statements("INSERT "));
    assert!(
        updates.len() >= 2 && !inserts.is_empty(),
        "{updates:?} {inserts:?}"
    );
    let existing = updates
        .iter()
        .chain(&inserts)
        .map(|statement| Orders::with_order(statement));
    existing
        .chain(inserts.iter().map(|statement| Orders::new(statement)))
        .collect()
}

#[test]
fn one_statement_is_shown_everywhere() {
    let updates = statements("UPDATE ");
    assert!(
        updates.iter().all(|update| *update == updates[0]),
        "{updates:#?}"
    );
}

#[tokio::test]
async fn a_holder_may_write_twice() {
    for orders in tables() {
        let guard = LockClient::in_memory()
            .exclusive("order:42")
            .acquire()
            .await
            .unwrap();
        for write in 1..=2 {
            assert!(
                orders.pay(guard.fence()),
                "write {write} changes no row: {}",
                orders.statement
            );
        }
        assert_eq!(orders.fence(), guard.fence().number());
    }
}

#[tokio::test]
async fn acquire_reentrant_writes_before_and_after_the_outer_guard() {
    for orders in tables() {
        let locks = LockClient::in_memory();
        let outer = locks.reentrant("order:42").acquire().await.unwrap();
        assert!(orders.pay(outer.fence()));
        let inner = outer
            .scope(locks.reentrant("order:42").acquire())
            .await
            .unwrap();
        assert!(
            orders.pay(inner.fence()),
            "the inner guard writes no row: {}",
            orders.statement
        );
        inner.release().await.unwrap();
        assert!(
            orders.pay(outer.fence()),
            "the outer guard writes no row: {}",
            orders.statement
        );
    }
}

/// The lock does not go through the store between the two, and the second has a larger token all
/// the same.
#[tokio::test(start_paused = true)]
async fn release_hands_off_locally_and_fences_out_the_earlier_task() {
    in_time(async {
        for orders in tables() {
            let traces = Captured::new();
            let _collecting = traces.set_default();
            let locks = LockClient::in_memory();
            let request = || locks.exclusive("order:42").wait(LONG);
            let first = request().acquire().await.unwrap();
            let mut waiting = Vec::new();
            for _ in 0..4 {
                waiting.push(begun(request().acquire()).await);
            }
            let mut before = first.fence();
            assert!(orders.pay(before));
            first.release().await.unwrap();
            for next in waiting {
                let guard = next.await.unwrap();
                assert!(
                    orders.pay(guard.fence()) && orders.pay(guard.fence()),
                    "{}",
                    orders.statement
                );
                assert!(
                    !orders.pay(before),
                    "a stale write changed the row: {}",
                    orders.statement
                );
                assert_eq!(orders.fence(), guard.fence().number());
                before = guard.fence();
                guard.release().await.unwrap();
            }
            assert!(
                traces
                    .events()
                    .iter()
                    .any(|event| event.message == "handed off in this process")
            );
        }
    })
    .await;
}

/// The lease of the first holder runs out, as that of a process that was stopped.
#[tokio::test(start_paused = true)]
async fn a_holder_whose_lock_went_to_another_is_refused() {
    for orders in tables() {
        let locks = LockClient::in_memory();
        let late = locks
            .exclusive("order:42")
            .no_renew()
            .acquire()
            .await
            .unwrap();
        let next = locks
            .exclusive("order:42")
            .wait(LONG * 2)
            .acquire()
            .await
            .unwrap();
        assert!(late.is_lost());
        assert!(orders.pay(next.fence()));
        assert!(
            !orders.pay(late.fence()),
            "a stale write changed the row: {}",
            orders.statement
        );
        assert!(orders.pay(next.fence()));
        assert_eq!(orders.fence(), next.fence().number());
    }
}
