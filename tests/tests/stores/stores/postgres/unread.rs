//! Sessions that do not read their error. The server sends it before it undoes the transaction, and
//! does not end the session meanwhile.

use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpSocket, TcpStream},
};
use tokio_postgres::{Client, Config, config::Host};

use super::{
    super::{role, url_as},
    client_of_new_database, held, number, once,
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
