//! Runs each example with a small load, and checks the last line of its output.

mod story;

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
};

use lock_tests::RedisServer;

use self::story::{EXACT, last_line, mistakes, oversells, sale, tell};

#[test]
fn a_flash_sale_in_memory_sells_exactly_its_stock() {
    let line = sale(&[]);
    assert!(line.starts_with(EXACT), "{line}");
}

#[tokio::test]
async fn flash_sale_of_four_processes_sells_exactly_its_stock() {
    let server = RedisServer::start().await;
    let url = server.url();
    let line = sale(&["--redis", &url, "--processes", "4"]);
    assert!(line.starts_with(EXACT), "{line}");
    assert!(
        server.keys("*").await.is_empty(),
        "{:?}",
        server.keys("*").await
    );
}

#[test]
fn a_flash_sale_without_a_lock_oversells() {
    oversells(&[]);
}

#[tokio::test]
async fn a_lottery_draws_once() {
    let server = RedisServer::start().await;
    let line = last_line(&tell(
        env!("CARGO_BIN_EXE_lottery"),
        &["--redis", &server.url()],
    ));
    assert_eq!(line, "replicas=8 draws=1 skipped=7");
}

#[tokio::test]
async fn a_catalog_is_never_read_while_it_is_written() {
    let server = RedisServer::start().await;
    for options in [&[][..], &["--redis", &server.url()]] {
        let line = last_line(&tell(env!("CARGO_BIN_EXE_catalog"), options));
        assert!(line.ends_with(" writer_met=0 torn_reads=0"), "{line}");
    }
}

#[cfg(feature = "payments")]
#[tokio::test]
async fn a_payment_is_charged_once_however_often_it_is_sent() {
    let server = RedisServer::start().await;
    for options in [&[][..], &["--redis", &server.url()]] {
        let line = last_line(&tell(env!("CARGO_BIN_EXE_payments"), options));
        let exact = "payments=200 requests=1000 charges=200 replays=800 different=0 errors=0";
        assert_eq!(line, exact);
    }
    // Only the latest fencing token of each key is left.
    let kept = server.keys("*").await;
    assert!(kept.iter().all(|key| key.ends_with(":f")), "{kept:?}");
}

#[cfg(feature = "inventory")]
#[tokio::test]
async fn an_inventory_is_reserved_and_counted_exactly() {
    let server = RedisServer::start().await;
    for options in [&[][..], &["--redis", &server.url()]] {
        let output = tell(env!("CARGO_BIN_EXE_inventory"), options);
        let line = last_line(&output);
        assert!(
            line.starts_with("orders=1600 ") && line.ends_with(" oversold=0 miscounted=0 errors=0"),
            "{line}"
        );
        // Two stock counts take four times as long as a request waits.
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("refused: Aborted, retry in 100ms."), "{text}");
    }
}

#[cfg(feature = "inventory")]
#[test]
fn an_inventory_without_a_lock_is_oversold_and_miscounted() {
    let line = last_line(&tell(env!("CARGO_BIN_EXE_inventory"), &["--no-lock"]));
    assert!(
        line.ends_with(" errors=0")
            && !line.contains(" oversold=0 ")
            && !line.contains(" miscounted=0 "),
        "{line}"
    );
}

#[cfg(feature = "orders")]
#[tokio::test]
async fn an_order_is_charged_once_whatever_its_policy() {
    let server = RedisServer::start().await;
    for options in [&[][..], &["--redis", &server.url()]] {
        let line = last_line(&tell(env!("CARGO_BIN_EXE_orders"), options));
        assert!(
            line.starts_with("charges=2 double_charges=0 refused=") && line.ends_with(" errors=0"),
            "{line}"
        );
    }
}

#[test]
fn a_mistake_in_the_options_is_one_line() {
    mistakes(&[
        (&["--redis", "nonsense"], "redis://"),
        (&["--processes", "4"], "--redis"),
        (&["--concurrency", "0"], "concurrency"),
        (&["--redis", "redis://127.0.0.1:1/"], "127.0.0.1:1"),
        (&["--store", "redis"], "--redis <URL>"),
        (&["--store", "memory", "--processes", "4"], "--redis"),
        (
            &["--store", "memory", "--redis", "redis://127.0.0.1/"],
            "--redis URL cannot be used with --store memory",
        ),
        (
            &["--store", "postgres", "--redis", "redis://127.0.0.1/"],
            "--redis URL cannot be used with --store postgres",
        ),
        (
            &["--redis", "redis://a/", "--postgres", "postgres://a/b"],
            "--redis <URL>",
        ),
    ]);
}

/// An orchestrator stops a server by SIGTERM: it finishes its requests and releases its locks.
fn ends_on_sigterm(story: &str) {
    let mut server = Command::new(story)
        .args(["--serve", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the story is built");
    let mut output = BufReader::new(server.stdout.take().expect("it is piped"));
    let mut line = String::new();
    output.read_line(&mut line).expect("it prints its address");
    let kill = Command::new("kill")
        .args(["-TERM", &server.id().to_string()])
        .status();
    assert!(kill.expect("kill is installed").success());
    assert!(server.wait().expect("it ends").success());
}

#[test]
fn flash_sale_ends_on_sigterm() {
    ends_on_sigterm(env!("CARGO_BIN_EXE_flash-sale"));
}

#[cfg(feature = "orders")]
#[test]
fn orders_ends_on_sigterm() {
    ends_on_sigterm(env!("CARGO_BIN_EXE_orders"));
}

#[cfg(feature = "inventory")]
#[test]
fn inventory_ends_on_sigterm() {
    ends_on_sigterm(env!("CARGO_BIN_EXE_inventory"));
}
