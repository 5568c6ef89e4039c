//! Errors of connecting: each names the server and the remedy, and never the password.

use std::{num::NonZeroU32, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{
    LockClient, LockClientBuilder, LockError, LockErrorKind, PostgresOptions, health::Verdict,
    store::postgres::MIGRATION,
};
use lock_tests::{
    PostgresServer,
    access::file_of,
    chain,
    place::{LONG, Stopwatch, begun, eventually, in_time},
    postgres, shared_postgres, shared_server, unique,
};
use tokio::net::TcpListener;

use super::{
    super::{role, url_as},
    held, once, server,
};

/// A role without rights, and the URL of a new database as this role.
async fn stranger() -> (String, tokio_postgres::Client, String) {
    let url = shared_postgres().await.new_database().await;
    let owner = postgres::connect(&url).await;
    let role = role(&owner).await;
    (url_as(&role, &url).await, owner, role)
}

#[track_caller]
fn assert_says(error: &LockError, kind: LockErrorKind, words: &[&str]) {
    let message = chain(error);
    assert_eq!(error.kind(), kind, "{message}");
    for word in words {
        assert!(message.contains(word), "{word} is missing: {message}");
    }
    assert!(!message.contains("hunter2"), "{message}");
}

async fn assert_refused(url: &str, kind: LockErrorKind, words: &[&str]) {
    let error = in_time(LockClient::connect(url)).await.unwrap_err();
    assert_says(&error, kind, words);
}

/// The settings of a client that trusts this certificate.
fn trusting(pem: &str) -> LockClientBuilder {
    LockClient::builder().postgres(PostgresOptions::new().root_certificate(pem))
}

#[tokio::test]
async fn a_wrong_password_and_an_unknown_user_are_refused() {
    let server = PostgresServer::builder().password("secret").start().await;
    let address = format!("127.0.0.1:{}", server.port());
    for user in ["postgres", "ann"] {
        let url = server.url_as(user, "hunter2", "postgres");
        let words = [&address, "password authentication failed", user];
        assert_refused(&url, LockErrorKind::Unauthenticated, &words).await;
    }
    let url = format!("postgres://postgres@{address}/a");
    assert_refused(&url, LockErrorKind::Unavailable, &["password missing"]).await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    once(locks.exclusive("a")).await.unwrap();
}

#[tokio::test]
async fn a_missing_database_is_named() {
    let url = shared_postgres().await.url_of("shopp");
    let words = ["/shopp", "\"shopp\" does not exist", "3D000"];
    assert_refused(&url, LockErrorKind::InvalidUrl, &words).await;
}

#[tokio::test]
async fn urls_are_checked_before_the_server() {
    // What follows the scheme.
    for (rest, word) in [
        ("", "no host"),
        ("/shop", "no host"),
        ("127.0.0.1:port/shop", "port"),
        ("app:hunter2@127.0.0.1/shop?lease=3", "lease"),
        // The driver takes the text after the first `@` for the host.
        ("app:top@hunter2@127.0.0.1:1/shop", "%40"),
        ("127.0.0.1:1/shop?user=app&password=top@hunter2", "%40"),
        ("app@127.0.0.1:1/shop?password=top@hunter2", "%40"),
        ("app:a?b=hunter2@127.0.0.1/shop", "%3F"),
        ("app%3Atop%40hunter2/shop", "a host contains"),
        ("127.0.0.1/shop?host=top%40hunter2", "a host contains"),
        ("app%3Ahunter2@127.0.0.1/shop", "the user contains"),
        ("127.0.0.1/shop?password=top&hunter2=", "unknown parameter"),
        ("127.0.0.1/shop?sslrootcert=/no/such/file", "/no/such/file"),
        (
            "127.0.0.1/shop?target_session_attrs=primary",
            "target_session_attrs",
        ),
    ] {
        for scheme in ["postgres", "postgresql"] {
            let url = format!("{scheme}://{rest}");
            println!("{url}");
            assert_refused(&url, LockErrorKind::InvalidUrl, &[word]).await;
            let error = LockClient::connect_lazy(&url).unwrap_err();
            assert_says(&error, LockErrorKind::InvalidUrl, &[word]);
        }
    }
    let builder = LockClient::builder().namespace("a:b");
    let connected = builder.connect_lazy("postgres://127.0.0.1/shop");
    let error = connected.unwrap_err();
    assert_says(&error, LockErrorKind::InvalidSpec, &["namespace"]);
}

#[tokio::test]
async fn another_server_is_no_postgresql() {
    let redis = shared_server().await;
    let address = format!("127.0.0.1:{}/shop", redis.port());
    let url = format!("postgres://app:hunter2@{address}");
    assert_refused(&url, LockErrorKind::Unavailable, &[&address]).await;
    // And the other way round.
    let url = format!("redis://127.0.0.1:{}", shared_postgres().await.port());
    in_time(LockClient::connect(&url)).await.unwrap_err();
}

#[tokio::test]
async fn a_server_that_is_away_or_silent_is_unavailable_in_time() {
    let server = server().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = silent.local_addr().unwrap();
    server.kill();
    for (address, most) in [
        (format!("127.0.0.1:{}", server.port()), 2),
        (silent.to_string(), 8),
    ] {
        let begun = Stopwatch::start();
        let url = format!("postgres://app:hunter2@{address}/shop");
        assert_refused(&url, LockErrorKind::Unavailable, &[&address]).await;
        let most = Duration::from_secs(most);
        assert!(begun.elapsed() < most, "{:?}", begun.elapsed());
    }
}

#[tokio::test]
async fn a_client_may_start_before_its_server() {
    in_time(async {
        let server = server().await;
        server.kill();
        let locks = LockClient::connect_lazy(&server.url()).unwrap();
        let error = once(locks.exclusive("a").no_wait()).await.unwrap_err();
        let address = format!("127.0.0.1:{}", server.port());
        assert_says(&error, LockErrorKind::Unavailable, &["refused"]);
        assert_ne!(locks.health().await.verdict(), Verdict::Healthy);
        let waiting = tokio::spawn(begun(locks.exclusive("a").wait(LONG).acquire()).await);
        server.restart().await;
        waiting.await.unwrap().unwrap().release().await.unwrap();
        let health = locks.health().await;
        assert_eq!(health.verdict(), Verdict::Healthy, "{health}");
        let shown = health.to_string();
        for word in [address.as_str(), "PostgreSQL 1", "primary"] {
            assert!(shown.contains(word), "{word}: {shown}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_user_without_rights_gets_the_statements_to_execute() {
    in_time(async {
        let (url, owner, role) = stranger().await;
        let words = ["cannot be created", "MIGRATION", "as the owner"];
        assert_refused(&url, LockErrorKind::Forbidden, &words).await;

        owner.batch_execute(MIGRATION).await.unwrap();
        let error = LockClient::connect(&url).await.unwrap_err();
        assert_says(&error, LockErrorKind::Forbidden, &["grant usage on schema"]);
        // The rights are those of the error, of the file and of the guide.
        let mut grants = 0;
        let shown = chain(&error);
        let is_grant = |line: &&str| line.starts_with("--   grant ") && line.ends_with(" to app;");
        for line in MIGRATION.lines().filter(is_grant) {
            let grant = line.trim_start_matches(['-', ' ']).trim_end_matches(';');
            let to_user = grant.replace(" to app", " to <user>");
            assert!(shown.contains(&to_user), "{to_user}: {shown}");
            assert!(GUIDE.contains(&format!("{grant};")), "{grant}");
            let grant = grant.replace(" to app", &format!(" to {role}"));
            owner.batch_execute(&grant).await.unwrap();
            grants += 1;
        }
        assert_eq!(grants, 4);
        uses_everything(&url).await;
    })
    .await;
}

const GUIDE: &str = include_str!("../../../../../lock-runtime/guide/postgres.md");

/// Operations of every kind, as the user of a URL.
async fn uses_everything(url: &str) {
    let (one, other) = (
        LockClient::connect(url).await.unwrap(),
        LockClient::connect(url).await.unwrap(),
    );
    let guard = held(&one, "a").await;
    let waiting = tokio::spawn(begun(other.exclusive("a").wait(LONG).acquire()).await);
    super::waiters(&one, "a", 1).await;
    let mut db = postgres::connect(url).await;
    let transaction = db.transaction().await.unwrap();
    let guarded = lock_runtime::fencing::guard_named(&transaction, "lock:a", guard.fence()).await;
    guarded.unwrap();
    transaction.commit().await.unwrap();
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    guard.downgrade().await.unwrap().release().await.unwrap();
    once(one.all(["a", "b"])).await.unwrap();
    once(one.permits("p", NonZeroU32::MIN)).await.unwrap();
    let page = one.list_page("").timeout(LONG).await;
    assert!(page.locks.is_empty() && page.errors.is_empty(), "{page:?}");
    let options = PostgresOptions::default();
    let records = lock_runtime::store::postgres::PostgresRecords::connect(url, "lock", options);
    assert_eq!(records.await.unwrap().remove_old().await.unwrap(), 0);
}

#[tokio::test]
async fn a_user_may_own_the_schema_without_owning_the_database() {
    let (url, owner, role) = stranger().await;
    let create = format!("create schema lock_runtime authorization {role}");
    owner.batch_execute(&create).await.unwrap();
    uses_everything(&url).await;
}

/// The schema is that of fencing, which another user has created.
#[tokio::test]
async fn a_schema_of_another_user_is_not_changed() {
    let (url, owner, role) = stranger().await;
    lock_runtime::fencing::install(&owner).await.unwrap();
    let grant = format!("grant usage on schema lock_runtime to {role}");
    owner.batch_execute(&grant).await.unwrap();
    let words = ["permission denied for schema", "MIGRATION", "as the owner"];
    assert_refused(&url, LockErrorKind::Forbidden, &words).await;
    owner.batch_execute(MIGRATION).await.unwrap();
}

#[tokio::test]
async fn a_server_without_connections_is_named_and_used_again() {
    in_time(async {
        let builder = PostgresServer::builder()
            .in_memory()
            .setting("max_connections", "6");
        let builder = builder.setting("superuser_reserved_connections", "1");
        let server = builder.start().await;
        let admin = server.connect().await;
        let app = "create role app login; grant create on database postgres to app";
        admin.batch_execute(app).await.unwrap();
        let url = server.url_as("app", "", "postgres");
        let locks = LockClient::connect(&url).await.unwrap();
        let guard = held(&locks, "a").await;
        let mut others = Vec::new();
        while let Ok(other) = postgres::try_connect(&url).await {
            others.push(other);
        }
        let words = ["53300", "max_connections", "fewer connections"];
        assert_refused(&url, LockErrorKind::Unavailable, &words).await;
        // The client shares the connections that it has.
        let request = |number: usize| locks.exclusive(format!("k{number}"));
        for result in join_all((0..50).map(|number| once(request(number)))).await {
            result.unwrap();
        }
        guard.verify().await.unwrap();
        others.clear();
        eventually("a connection is free", async || {
            LockClient::connect(&url).await.is_ok()
        })
        .await;
        guard.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_database_of_another_encoding_is_refused() {
    let server = shared_postgres().await;
    let admin = server.connect().await;
    let name = unique("latin").replace('-', "_");
    let create = format!("create database {name} encoding 'LATIN1' locale 'C' template template0");
    admin.batch_execute(&create).await.unwrap();
    let url = server.url_of(&name);
    assert_refused(&url, LockErrorKind::WrongServer, &["LATIN1", "UTF8"]).await;
}

#[tokio::test]
async fn a_client_with_an_authority_of_its_own_locks_over_tls() {
    in_time(async {
        // This fails only if another test was faster.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = PostgresServer::builder().in_memory().tls().start().await;
        let admin = server.connect().await;
        let trusted = file_of(server.ca_pem());
        let with = |parameters: &str| format!("{}?{parameters}", server.url());
        let file = format!("sslrootcert={}", trusted.path().display());
        let full = format!("sslmode=verify-full&{file}");
        let own = || trusting(server.ca_pem());
        let mut clients = Vec::new();
        for (builder, url) in [
            (LockClient::builder(), with(&file)),
            (LockClient::builder(), with(&full)),
            (own(), with("sslmode=require")),
            (own(), server.url()),
        ] {
            clients.push(builder.connect(&url).await.unwrap());
        }
        let guard = held(&clients[0], "a").await;
        let waiting = tokio::spawn(begun(clients[1].exclusive("a").wait(LONG).acquire()).await);
        super::waiters(&clients[2], "a", 1).await;
        let plain = "select count(*) from pg_stat_ssl join pg_stat_activity using (pid) \
            where application_name = 'lock-runtime' and not ssl";
        assert_eq!(super::number(&admin, plain).await, 0);
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_certificate_that_no_chain_can_verify_is_pinned() {
    in_time(async {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = || PostgresServer::builder().in_memory().tls_self_signed();
        let (server, stranger) = (builder().start().await, builder().start().await);
        let connect = async |pem: &str| trusting(pem).connect(&server.url()).await;
        let locks = connect(server.ca_pem()).await.unwrap();
        once(locks.exclusive("a")).await.unwrap();
        let error = connect(stranger.ca_pem()).await.unwrap_err();
        assert_says(&error, LockErrorKind::Unavailable, &["certificate"]);
    })
    .await;
}

/// Whether the connections of clients to a server use TLS.
async fn uses_tls(admin: &tokio_postgres::Client) -> Vec<bool> {
    let query = "select distinct ssl from pg_stat_ssl join pg_stat_activity using (pid) \
        where application_name = 'lock-runtime'";
    let rows = admin.query(query, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Locks with two clients, of which one listens for messages.
async fn assert_uses_tls(server: &PostgresServer, parameters: &str, expected: bool) {
    let admin = server.connect().await;
    let url = format!("{}{parameters}", server.url());
    let (one, other) = (
        LockClient::connect(&url).await.unwrap(),
        LockClient::connect(&url).await.unwrap(),
    );
    let guard = held(&one, "a").await;
    let waiting = tokio::spawn(begun(other.exclusive("a").wait(LONG).acquire()).await);
    super::waiters(&one, "a", 1).await;
    assert_eq!(uses_tls(&admin).await, [expected], "{parameters}");
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    drop((one, other));
    eventually("the connections have ended", async || {
        uses_tls(&admin).await.is_empty()
    })
    .await;
}

/// As with `libpq`: no authority is named, so the certificate of the server is not verified.
#[tokio::test]
async fn tls_is_preferred_where_the_server_offers_it() {
    in_time(async {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = || PostgresServer::builder().in_memory();
        let server = builder().tls_for(&["elsewhere.example"]).start().await;
        assert_uses_tls(&server, "", true).await;
        assert_uses_tls(&server, "?sslmode=prefer", true).await;
        assert_uses_tls(&server, "?sslmode=disable", false).await;
        let url = format!("{}?sslmode=require", server.url());
        assert_refused(&url, LockErrorKind::Unavailable, &["certificate"]).await;
        // The server does not offer it, its versions of TLS are too old, and it refuses clients
        // that use it.
        assert_uses_tls(&builder().start().await, "", false).await;
        let old = builder().tls().setting("ssl_min_protocol_version", "TLSv1");
        let old = old.setting("ssl_max_protocol_version", "TLSv1.1");
        assert_uses_tls(&old.start().await, "", false).await;
        let admin = server.connect().await;
        server.reject_tls(&admin).await;
        assert_uses_tls(&server, "", false).await;
    })
    .await;
}

#[tokio::test]
async fn certificates_are_verified() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let tls = || PostgresServer::builder().in_memory();
    let (server, stranger) = (tls().tls().start().await, tls().tls().start().await);
    let elsewhere = tls().tls_for(&["elsewhere.example"]).start().await;
    let plain = shared_postgres().await;
    for (server, authority, word) in [
        (&server, stranger.ca_pem(), "certificate"),
        (&elsewhere, elsewhere.ca_pem(), "elsewhere.example"),
        (plain, server.ca_pem(), "does not support TLS"),
    ] {
        let url = server.url();
        let connecting = trusting(authority).connect(&url);
        let error = in_time(connecting).await.unwrap_err();
        assert_says(&error, LockErrorKind::Unavailable, &[word]);
    }
    for pem in [
        "hunter2",
        "-----BEGIN CERTIFICATE-----\nhunter2\n-----END CERTIFICATE-----\n",
    ] {
        let connected = trusting(pem).connect_lazy(&server.url());
        let error = connected.unwrap_err();
        assert_says(&error, LockErrorKind::InvalidUrl, &["root certificate"]);
    }
}
