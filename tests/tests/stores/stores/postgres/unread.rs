//! Sessions that do not read their error. The server sends it before it undoes the transaction, and
//! does not end the session meanwhile.

use std::future::poll_fn;

use lock_runtime::LockClient;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpSocket, TcpStream},
    sync::mpsc,
};
use tokio_postgres::{AsyncMessage, Client, Config, NoTls, config::Host};

use super::{
    super::{role, url_as},
    client_of_new_database, held, number, once,
    schema::{CURRENT, FORMAT},
};
use lock_tests::place::{LONG, eventually, in_time};

const NAME: &str = "lock:order:42";
/// The length of an error that fits into no buffer of a connection.
const LONG_ERROR: usize = 16 << 20;

/// Executes a statement whose error contains its own text, which is long, and reads no reply.
async fn execute_unread(url: &str, statement: &str) -> TcpStream {
    let config: Config = url.parse().unwrap();
    let [Host::Tcp(host)] = config.get_hosts() else {
        panic!("{url}: not the address of one server")
    };
    let address = format!("{host}:{}", config.get_ports()[0]).parse().unwrap();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let (user, database) = (config.get_user().unwrap(), config.get_dbname().unwrap());
    let startup = format!("\0\x03\0\0user\0{user}\0database\0{database}\0\0");
    let code = format!(
        "do $$ begin execute '{} /*' || repeat('x', {LONG_ERROR}) || '*/'; end $$\0",
        statement.replace('\'', "''")
    );
    for (kind, text) in [("", startup), ("Q", code)] {
        let length = u32::try_from(text.len() + 4).unwrap();
        let message = [kind.as_bytes(), &length.to_be_bytes(), text.as_bytes()].concat();
        stream.write_all(&message).await.unwrap();
    }
    stream
}

/// Waits until the server sends an error to the role, and receives nothing from it.
async fn sends_in_vain(admin: &Client, role: &str) {
    let query = format!(
        "select count(*) from pg_stat_activity \
         where usename = '{role}' and wait_event = 'ClientWrite'"
    );
    eventually("the server waits for a reader", async || {
        number(admin, &query).await == 1
    })
    .await;
}

async fn caller_of_guard(admin: &Client) -> String {
    let caller = role(admin).await;
    let grants = format!(
        "grant usage on schema lock_runtime to {caller}; \
         grant execute on function lock_runtime.guard to {caller}"
    );
    admin.batch_execute(&grants).await.unwrap();
    caller
}

/// The lock `NAME`, released: the URL of a caller of `guard`, and the latest token.
async fn free_lock(url: &str, locks: &LockClient, admin: &Client) -> (String, i64) {
    let guard = held(locks, "order:42").await;
    let latest = i64::from(guard.fence());
    guard.release().await.unwrap();
    let caller = caller_of_guard(admin).await;
    (url_as(&caller, url).await, latest)
}

/// Neither with the latest token nor with another one, in each level of isolation.
#[tokio::test]
async fn a_refused_guard_keeps_no_free_lock_while_its_error_is_unread() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        let guard = held(&locks, "order:42").await;
        let latest = i64::from(guard.fence());
        guard.release().await.unwrap();
        let mut unread = Vec::new();
        for token in [latest, latest - 1, latest + 1] {
            for isolation in ["read committed", "repeatable read", "serializable"] {
                let caller = caller_of_guard(&admin).await;
                let set = format!(
                    "alter role {caller} set default_transaction_isolation = '{isolation}'"
                );
                admin.batch_execute(&set).await.unwrap();
                let statement = format!("select lock_runtime.guard('{NAME}', {token})");
                let url = url_as(&caller, &url).await;
                unread.push(execute_unread(&url, &statement).await);
                sends_in_vain(&admin, &caller).await;
            }
        }
        once(locks.exclusive("order:42").wait(LONG)).await.unwrap();
        drop(unread);
    })
    .await;
}

/// A call that waits for a grant in progress locks the row that comes of it, which its token does
/// not fit any more.
#[tokio::test]
async fn a_guard_that_meets_the_next_grant_keeps_no_row_while_its_error_is_unread() {
    in_time(async {
        let (url, locks, mut admin) = client_of_new_database().await;
        for is_held in [false, true] {
            let guard = locks.exclusive("order:42").acquire().await.unwrap();
            let token = i64::from(guard.fence());
            if !is_held {
                guard.release().await.unwrap();
            }
            let caller = caller_of_guard(&admin).await;
            let as_caller = url_as(&caller, &url).await;
            let grant = admin.transaction().await.unwrap();
            let granted = format!(
                "select from lock_runtime.record where name = '{NAME}' for update; \
                 update lock_runtime.record set version = version + 1, since = since + 5, \
                 fence = fence + 5 where name = '{NAME}'"
            );
            grant.batch_execute(&granted).await.unwrap();
            let statement = format!("select lock_runtime.guard('{NAME}', {token})");
            let unread = execute_unread(&as_caller, &statement).await;
            let waiting = format!(
                "select count(*) from pg_stat_activity \
                 where usename = '{caller}' and wait_event_type = 'Lock'"
            );
            let other = lock_tests::postgres::connect(&url).await;
            eventually("it waits for the grant", async || {
                number(&other, &waiting).await == 1
            })
            .await;
            grant.commit().await.unwrap();
            sends_in_vain(&admin, &caller).await;
            let locked = format!(
                "select count(*) from (select from lock_runtime.record \
                 where name = '{NAME}' for update nowait) locked"
            );
            assert_eq!(number(&admin, &locked).await, 1, "is_held: {is_held}");
            drop(unread);
        }
    })
    .await;
}

/// The messages that the server sends during a call of `guard` that it refuses.
async fn said_by_guard(url: &str, isolation: &str, name: &str, token: i64) -> Vec<String> {
    let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    let (said, mut messages) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notice(notice) = message {
                let _ = said.send(notice.message().to_owned());
            }
        }
    });
    let set = format!(
        "set client_min_messages = debug5; set default_transaction_isolation = '{isolation}'"
    );
    client.batch_execute(&set).await.unwrap();
    let call = format!("select lock_runtime.guard('{name}', {token})");
    client.batch_execute(&call).await.unwrap_err();
    drop(client);
    let mut all = Vec::new();
    while let Some(message) = messages.recv().await {
        all.push(message);
    }
    all
}

/// A message would be sent while a row is locked that `guard` looks at, and the server would wait
/// for a caller that does not read it.
#[tokio::test]
async fn guard_sends_no_message_while_it_has_a_row() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        let (url, latest) = free_lock(&url, &locks, &admin).await;
        for (isolation, name, token) in [
            ("read committed", NAME, latest),
            ("repeatable read", "lock:unknown", 1),
            ("serializable", "lock:unknown", 1),
        ] {
            let said = said_by_guard(&url, isolation, name, token).await;
            let is_of = |part: &str| said.iter().any(|message| message.contains(part));
            assert!(is_of("StartTransaction"), "the server reports: {said:?}");
            assert!(!is_of("SubTransaction"), "{isolation}: {said:?}");
        }
    })
    .await;
}

/// The session would end, and send its error, while `guard` has a row.
#[tokio::test]
async fn guard_ends_no_session_at_an_error_of_its_own() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        let (url, latest) = free_lock(&url, &locks, &admin).await;
        let session = lock_tests::postgres::connect(&url).await;
        for isolation in ["read committed", "repeatable read", "serializable"] {
            for (name, token) in [(NAME, latest), ("lock:unknown", 1)] {
                let set = format!(
                    "set exit_on_error = on; set default_transaction_isolation = '{isolation}'"
                );
                session.batch_execute(&set).await.unwrap();
                let call = format!("select lock_runtime.guard('{name}', {token})");
                let error = session.batch_execute(&call).await.unwrap_err();
                let error = error.as_db_error().unwrap();
                assert_eq!(error.code().code(), "LK001", "{isolation}: {error}");
                assert_eq!(error.severity(), "ERROR", "{isolation}: {error}");
            }
        }
    })
    .await;
}

/// The lock of the table is taken before the rights to it are checked.
#[tokio::test]
async fn an_upgrade_that_a_stranger_delays_is_left_for_later() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        once(locks.exclusive("a")).await.unwrap();
        let before = format!("update lock_runtime.format set version = {}", CURRENT - 1);
        admin.batch_execute(&before).await.unwrap();
        let table = "select 'lock_runtime.format'::regclass::oid::bigint";
        let table = number(&admin, table).await;
        let stranger = role(&admin).await;
        let statement = format!("select brin_summarize_new_values({table}::oid)");
        let unread = execute_unread(&url_as(&stranger, &url).await, &statement).await;
        sends_in_vain(&admin, &stranger).await;
        let late = LockClient::connect(&url).await.unwrap();
        once(late.exclusive("a").wait(LONG)).await.unwrap();
        assert_eq!(number(&admin, FORMAT).await, i64::from(CURRENT) - 1);
        drop(unread);
    })
    .await;
}
