//! The commands that show and change locks, and the exit statuses of `run`.

use std::time::Duration;

use lock_runtime::{LockClient, LockErrorKind, Loss};
use serde_json::Value;

use super::{Ended, Store};
use lock_tests::place::{LONG, begun, eventually};

fn rows(ended: &Ended) -> Vec<Vec<&str>> {
    let lines = ended.output.lines();
    lines
        .map(|line| line.split_whitespace().collect())
        .collect()
}

#[tokio::test]
async fn locks_are_listed_with_holders_and_waiters() {
    let store = Store::start().await;
    let builder = LockClient::builder().identity("orders@web-1");
    let locks = store.client_of(builder).await;
    let guard = locks.exclusive("order:1").acquire().await.unwrap();
    let _reader = locks.shared("order:2").acquire().await.unwrap();
    let _other = locks.exclusive("item:1").acquire().await.unwrap();
    let _hostile = locks.exclusive("order:3\u{202e}x").acquire().await.unwrap();
    let other = store.client().await;
    let _waiting = begun(other.exclusive("order:1").wait(LONG).acquire()).await;
    eventually("the names and the waiter are known", || async {
        let [one, two] = [other.inspect("order:1"), other.inspect("order:2")];
        let (one, two) = (one.await.unwrap(), two.await.unwrap());
        let mut holders = one.holders.iter().chain(&two.holders);
        !one.waiters.is_empty() && holders.all(|holder| holder.client.name().is_some())
    })
    .await;

    let listed = store.ended(&["ls", "order:"]).await;
    assert_eq!((listed.status, &*listed.errors), (0, ""));
    let mut rows = rows(&listed);
    let titles = ["KEY", "MODE", "HOLDER", "HELD", "LEFT", "FENCE", "WAITERS"];
    assert_eq!(rows.remove(0), titles);
    rows.sort();
    let fence = guard.fence().to_string();
    assert_eq!(rows.len(), 3, "{rows:?}");
    let [one, two, three] = [0, 1, 2].map(|row: usize| &rows[row]);
    assert_eq!(one[..3], ["order:1", "exclusive", "orders@web-1"]);
    assert_eq!(one[5..], [&*fence, "1"]);
    assert_eq!(two[..4], ["order:2", "shared", "orders@web-1", "-"]);
    assert_eq!(three[0], "order:3\\u{202e}x");
    assert!(!listed.output.contains('\u{1b}'), "no colours");

    let listed = store.ended(&["ls", "--json"]).await;
    let locks = listed
        .output
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let locks: Vec<_> = locks.collect();
    assert_eq!(locks.len(), 4);
    let one = locks.iter().find(|lock| lock["key"] == "order:1").unwrap();
    assert_eq!(one["holders"][0]["client"], "orders@web-1");

    let shown = store.ended(&["inspect", "order:1"]).await;
    for part in ["order:1 is held", &fence, "orders@web-1", "WAITER"] {
        assert!(shown.output.contains(part), "{part}: {shown:?}");
    }
    let shown = store.ended(&["inspect", "order:1", "--json"]).await.json();
    assert_eq!(shown["waiters"].as_array().unwrap().len(), 1);
    let shown = store.ended(&["inspect", "free"]).await;
    assert_eq!((shown.status, &*shown.output), (0, "free is free\n"));
}

#[tokio::test]
async fn only_the_holder_that_was_seen_is_revoked() {
    let store = Store::start().await;
    let locks = store.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let refused = store.ended(&["revoke", "a"]).await;
    assert_eq!(refused.status, 2);
    assert!(refused.errors.contains("--holder"), "{refused:?}");

    let shown = store.ended(&["inspect", "a", "--json"]).await.json();
    let id = shown["holders"][0]["id"].as_str().unwrap();
    let revoked = store.ended(&["revoke", "a", "--holder", id]).await;
    assert_eq!(
        (revoked.status, &*revoked.output),
        (0, &*format!("a from {id}: revoked\n"))
    );
    assert_eq!(
        guard.lost().await.kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );

    let guard = locks.exclusive("a").acquire().await.unwrap();
    let stale = store
        .ended(&["revoke", "a", "--holder", id, "--json"])
        .await;
    assert_eq!(
        (stale.status, stale.json()["outcome"].as_str()),
        (1, Some("changed"))
    );
    guard.verify().await.unwrap();
    let revoked = store.ended(&["revoke", "a", "--all"]).await;
    assert_eq!(revoked.status, 0, "{revoked:?}");
    let free = store.ended(&["revoke", "a", "--all"]).await;
    assert_eq!((free.status, &*free.output), (1, "a: not held\n"));

    let permit = locks
        .permits("p", 2.try_into().unwrap())
        .acquire()
        .await
        .unwrap();
    let shown = store
        .ended(&["inspect", "p", "--permits", "--json"])
        .await
        .json();
    let id = shown["holders"][0]["id"].as_str().unwrap();
    let revoked = store
        .ended(&["revoke", "p", "--permits", "--holder", id])
        .await;
    assert_eq!(revoked.status, 0, "{revoked:?}");
    assert_eq!(
        permit.lost().await.kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );
}

#[tokio::test]
async fn the_doctor_names_the_remedy() {
    let store = Store::start().await;
    let well = store.ended(&["doctor"]).await;
    assert_eq!(well.status, 0, "{well:?}");
    assert!(well.output.starts_with("healthy\n"), "{well:?}");
    store
        .server
        .query::<String>(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"])
        .await;
    let warned = store.ended(&["doctor", "--json"]).await;
    assert_eq!(warned.status, 1);
    assert_eq!(warned.json()["findings"][0]["code"], "eviction");
    let url = store.server.url();
    store.server.kill();
    for arguments in [
        &["doctor", &url][..],
        &["doctor", "--url", &url],
        &["--url", &url, "doctor"],
    ] {
        assert_eq!(store.ended(arguments).await.status, 69, "{arguments:?}");
    }
    let away = store.ended(&["doctor", &url]).await;
    assert!(away.output.contains("remedy: "), "{away:?}");
    for command in [
        &["ls"][..],
        &["inspect", "a"],
        &["run", "--key=a", "--", "true"],
    ] {
        let away = store.ended(command).await;
        assert_eq!(away.status, 69, "{away:?}");
        assert!(away.errors.starts_with("lockctl: "), "{away:?}");
    }
}

#[tokio::test]
async fn the_doctor_knows_refused_passwords_and_rights() {
    let store = Store::start().await;
    let set = |arguments: &'static [&'static str]| store.server.query::<String>(arguments);
    set(&["ACL", "SETUSER", "weak", "on", ">pw", "~*", "&*", "+ping"]).await;
    let url = store.server.url();
    for (user, word) in [("weak:wrong", "password"), ("weak:pw", "ACL SETUSER")] {
        let url = url.replace("redis://", &format!("redis://{user}@"));
        let refused = store.ended(&["doctor", &url]).await;
        assert_eq!(refused.status, 69, "{refused:?}");
        for part in ["unavailable\n", "remedy: ", word] {
            assert!(refused.output.contains(part), "{part}: {refused:?}");
        }
        let listed = store.ended(&["ls", "--url", &url]).await;
        assert_eq!(listed.status, 78, "{listed:?}");
        for shown in [&refused.output, &listed.errors] {
            assert!(!shown.contains(user), "the password is shown: {shown}");
        }
    }
}

#[tokio::test]
async fn a_command_gets_the_url_only_if_asked() {
    let store = Store::start().await;
    for (option, words) in [(None, 1), (Some("--pass-url"), 2)] {
        let options = ["run", "--key=backup"].into_iter().chain(option);
        let command = ["--", "sh", "-c", "echo url $LOCK_URL"];
        let arguments: Vec<_> = options.chain(command).collect();
        let mut running = store.running(&arguments);
        assert_eq!(running.line().await.split_whitespace().count(), words);
        assert_eq!(running.ended().await.0, 0);
    }
}

#[tokio::test]
async fn a_command_runs_under_the_lock_and_gives_the_status() {
    let store = Store::start().await;
    let script = "echo $LOCK_KEY $LOCK_FENCE; read line; echo $line; exit 7";
    let mut running = store.running(&[
        "run",
        "--key=backup",
        "--lease=2s",
        "--",
        "sh",
        "-c",
        script,
    ]);
    let line = running.line().await;
    let (key, fence) = line.split_once(' ').unwrap();
    assert_eq!(key, "backup");
    // Its input is that of lockctl, which is empty here.
    assert_eq!(running.line().await, "");
    let seen = store.client().await.inspect("backup").await.unwrap();
    // The latest of those that are reserved for the holder.
    let latest = u64::from(seen.fence.unwrap());
    assert!(
        (latest - fence.parse::<u64>().unwrap()) < 100,
        "{latest} {fence}"
    );
    let (status, errors) = running.ended().await;
    assert_eq!((status, &*errors), (7, ""));
    assert!(!store.is_held("backup").await);

    for (command, status) in [
        (&["true"][..], 0),
        (&["sh", "-c", "kill -KILL $$"], 137),
        (&["sh", "-c", "kill -TERM $$"], 143),
        (&["/etc/passwd"], 126),
        (&["no-such-program"], 127),
        (
            &["sh", "-c", "echo --not-an-option-of-lockctl", "--json"],
            0,
        ),
    ] {
        let arguments = [&["run", "--key=backup", "--"], command].concat();
        let ended = store.ended(&arguments).await;
        assert_eq!(ended.status, status, "{ended:?}");
        assert!(!store.is_held("backup").await);
    }
}

/// The end of a program that waits for a short time, or for a longer one where the store has not
/// answered within it.
async fn in_vain(store: &Store) -> Ended {
    for wait in ["200ms", "1s", "5s"] {
        let command = [
            "--json", "run", "--key=a", "--wait", wait, "--", "echo", "ran",
        ];
        let ended = store.ended(&command).await;
        if ended.status != 69 {
            return ended;
        }
    }
    panic!("the store does not answer");
}

#[tokio::test]
async fn a_lock_that_is_held_gives_the_status_75() {
    let store = Store::start().await;
    let locks = store
        .client_of(LockClient::builder().identity("orders@web-1"))
        .await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    eventually("the name is known", || async {
        store
            .ended(&["inspect", "a"])
            .await
            .output
            .contains("orders@web-1")
    })
    .await;
    let busy = store
        .ended(&["run", "--key=a", "--no-wait", "--", "echo", "ran"])
        .await;
    assert_eq!((busy.status, &*busy.output), (75, ""), "{busy:?}");
    let busy = in_vain(&store).await;
    assert_eq!((busy.status, &*busy.output), (75, ""), "{busy:?}");
    let error: Value = serde_json::from_str(&busy.errors).unwrap();
    assert_eq!(error["code"], "wait_timeout");
    assert!(
        error["error"].as_str().unwrap().contains("orders@web-1"),
        "{error}"
    );

    let waits = store.running(&["run", "--key=a", "--wait=20s", "--", "echo", "ran"]);
    let is_waiting = || async { !locks.inspect("a").await.unwrap().waiters.is_empty() };
    eventually("it waits", is_waiting).await;
    guard.release().await.unwrap();
    assert_eq!(waits.ended().await.0, 0);
}

#[tokio::test]
async fn a_signal_during_the_wait_leaves_nothing_behind() {
    let store = Store::start().await;
    let locks = store.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let waits = store.running(&["run", "--key=a", "--wait=1m", "--", "echo", "ran"]);
    let waiters = async || locks.inspect("a").await.unwrap().waiters.len();
    eventually("it waits", || async { waiters().await == 1 }).await;
    super::send("TERM", waits.id()).await;
    assert_eq!(waits.ended().await.0, 143);
    assert_eq!(waiters().await, 0);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn readers_and_permits_share() {
    let store = Store::start().await;
    for share in ["--shared", "--permits=2"] {
        let long = [
            "run",
            "--key=a",
            share,
            "--",
            "sh",
            "-c",
            "echo; read x; sleep 30",
        ];
        let mut one = store.running(&long);
        one.line().await;
        let beside = store
            .ended(&["run", "--key=a", "--no-wait", share, "--", "true"])
            .await;
        assert_eq!(beside.status, 0, "{beside:?}");
        super::send("TERM", one.id()).await;
        assert_eq!(one.ended().await.0, 143);
    }
    let kept = store
        .ended(&["run", "--key=b", "--min-hold=1m", "--", "true"])
        .await;
    assert_eq!(kept.status, 0);
    let again = store
        .ended(&["run", "--key=b", "--no-wait", "--", "true"])
        .await;
    assert_eq!(again.status, 75, "{again:?}");
}

#[tokio::test]
async fn mistakes_are_explained() {
    let store = Store::start().await;
    for (arguments, word) in [
        (&["run", "--key=a"][..], "COMMAND"),
        (&["run", "--", "true"], "--key"),
        (&["run", "--key=a", "--lease=soon", "--", "true"], "30s"),
        (&["run", "--key=a", "--lease=1ms", "--", "true"], "lease"),
        (&["run", "--key=", "--", "true"], "empty"),
        (
            &["run", "--key=a", "--no-wait", "--wait=1s", "--", "true"],
            "--wait",
        ),
        (&["revoke", "a", "--holder=x"], "16 hexadecimal digits"),
        (&["--url=memory:", "ls"], "store that the services use"),
        (&["lst"], "ls"),
        (&["run", "--key=a", "--leese=5s", "true"], "--lease"),
        (
            &["run", "--key=a", "--grace=1000y", "--", "true"],
            "longer than a day",
        ),
        (&["--url=", "ls"], "--url"),
        (&["doctor", ""], "URL"),
    ] {
        let ended = store.ended(arguments).await;
        assert_eq!(ended.status, 2, "{arguments:?}: {ended:?}");
        assert!(ended.errors.contains(word), "{word}: {ended:?}");
    }
    let other = store.ended(&["--url=http://a", "ls"]).await;
    assert_eq!(other.status, 78, "{other:?}");
    assert!(other.errors.contains("redis://"), "{other:?}");
    let without = super::ended(store.command(&["ls"]).env_remove("LOCK_URL")).await;
    assert_eq!(without.status, 2);
    assert!(without.errors.contains("--url redis://"), "{without:?}");
}

#[tokio::test]
async fn completions_and_the_manual_are_generated() {
    let store = Store::start().await;
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = store.ended(&["completions", shell]).await;
        assert!(
            script.status == 0 && script.output.contains("doctor"),
            "{script:?}"
        );
    }
    let manual = store.ended(&["man"]).await;
    assert!(manual.output.contains(".TH lockctl 1"), "{manual:?}");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let written = store.ended(&["man", "--dir", path]).await;
    assert_eq!(written.status, 0, "{written:?}");
    let page = std::fs::read_to_string(directory.path().join("lockctl-run.1")).unwrap();
    assert!(page.contains("LOCK_FENCE"), "{page}");
}

#[tokio::test]
async fn a_reader_that_leaves_is_no_error() {
    let store = Store::start().await;
    let locks = store.client().await;
    let mut guards = Vec::new();
    for number in 0..3000 {
        let key = format!("{number:04}{}", "x".repeat(100));
        guards.push(locks.exclusive(key).acquire());
    }
    let _guards = futures_util::future::join_all(guards).await;
    let lockctl = lock_tests::lockctl().display();
    for script in [
        format!("{lockctl} ls | head -1"),
        format!("{lockctl} ls --json | head -1"),
        format!("{lockctl} run --key=a -- yes | head -1"),
    ] {
        let mut shell = tokio::process::Command::new("bash");
        shell.args(["-c", &format!("set -o pipefail; {script}")]);
        shell.env("LOCK_URL", store.server.url());
        let ended = super::ended(&mut shell).await;
        assert_eq!((ended.status, &*ended.errors), (141, ""), "{script}");
        assert_eq!(ended.output.lines().count(), 1);
    }
    assert!(!store.is_held("a").await);
}

#[tokio::test]
async fn urls_of_tls_and_of_several_servers_are_known() {
    let store = Store::start().await;
    let server = Store::start().await;
    let [one, two] = [&store, &server].map(|store| store.server.url());
    for (url, word) in [
        ("rediss://127.0.0.1:1", "refused"),
        ("redis+cluster://127.0.0.1:1", "127.0.0.1:1"),
        ("redis+sentinel://127.0.0.1:1/mymaster", "127.0.0.1:1"),
    ] {
        let away = store.ended(&["--url", url, "ls"]).await;
        assert_eq!(away.status, 69, "{away:?}");
        assert!(away.errors.contains(word), "{away:?}");
    }
    let url = format!("redlock:{one},{two},redis://127.0.0.1:1");
    let degraded = store.ended(&["--url", &url, "doctor", "--json"]).await;
    assert_eq!(degraded.json()["servers"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn permits_of_the_name_are_shown_without_being_asked_for() {
    let store = Store::start().await;
    let locks = store.client().await;
    let request = || locks.permits("mailer", 3.try_into().unwrap()).acquire();
    let _permits = [
        request().await.unwrap(),
        request().await.unwrap(),
        request().await.unwrap(),
    ];
    let shown = store.ended(&["inspect", "mailer"]).await;
    assert!(
        shown.output.starts_with("3 of 3 permits mailer are held"),
        "{shown:?}"
    );
    let value = store.ended(&["inspect", "mailer", "--json"]).await.json();
    assert_eq!(
        (&value["kind"], value["holders"].as_array().unwrap().len()),
        (&"permits".into(), 3)
    );
    let _lock = locks.exclusive("mailer").acquire().await.unwrap();
    let shown = store.ended(&["inspect", "mailer"]).await;
    for part in [
        "mailer is held; fencing token",
        "3 of 3 permits mailer are held; latest",
    ] {
        assert!(shown.output.contains(part), "{part}: {shown:?}");
    }
}

#[tokio::test]
async fn a_list_is_sorted_and_an_empty_one_is_explained() {
    let store = Store::start().await;
    let locks = store.client().await;
    let empty = store.ended(&["ls"]).await;
    assert_eq!(
        (empty.status, &*empty.errors),
        (0, "lockctl: no lock is held\n")
    );
    let mut guards = Vec::new();
    for number in (10..40).rev() {
        guards.push(
            locks
                .exclusive(format!("order:{number}"))
                .acquire()
                .await
                .unwrap(),
        );
    }
    let readers = [
        locks.shared("order:a").acquire(),
        locks.shared("order:a").acquire(),
    ];
    let _readers = futures_util::future::try_join_all(readers.map(IntoFuture::into_future))
        .await
        .unwrap();
    let listed = store.ended(&["ls", "order:"]).await;
    let rows = rows(&listed);
    assert!(rows[1..].is_sorted_by_key(|row| row[0]), "{listed:?}");
    // A token of the key is not that of each reader.
    assert!(rows[31..].iter().all(|row| row[5] == "-"), "{listed:?}");
    assert_eq!(rows.len(), 33);
    let pattern = store.ended(&["ls", "order:*"]).await;
    assert_eq!((pattern.status, rows_of(&pattern)), (0, 1));
    assert!(
        pattern.errors.contains("did you mean `order:`"),
        "{pattern:?}"
    );
    let other = store.ended(&["ls", "item:"]).await;
    assert!(other.errors.contains("begins with item:"), "{other:?}");
    assert_eq!(store.ended(&["ls", "item:", "--json"]).await.errors, "");
}

#[tokio::test]
async fn a_list_shows_the_locks_in_one_state() {
    let store = Store::start().await;
    let locks = store.client().await;
    let _held = locks.exclusive("order:1").acquire().await.unwrap();
    let report = locks.once("report:1");
    let report = report.run_bytes(async |_| Ok::<_, LockErrorKind>(b"secret".to_vec()));
    report.await.unwrap().unwrap();
    let kept = locks.exclusive("mail:1").min_hold(Duration::from_secs(60));
    kept.acquire().await.unwrap().release().await.unwrap();
    for (state, key) in [
        ("held", "order:1"),
        ("done", "report:1"),
        ("reserved", "mail:1"),
    ] {
        let listed = store.ended(&["ls", "--state", state]).await;
        let rows = rows(&listed);
        assert_eq!((rows.len(), rows[1][0]), (2, key), "{listed:?}");
        assert!(!listed.output.contains("secret"), "{listed:?}");
    }
    let none = store.ended(&["ls", "--state", "waiting"]).await;
    assert_eq!(none.errors, "lockctl: no lock is waited for\n");
}

fn rows_of(ended: &Ended) -> usize {
    ended.output.lines().count()
}

#[tokio::test]
async fn a_job_of_cron_is_skipped_without_a_word() {
    let store = Store::start().await;
    let locks = store.client().await;
    let guard = locks.exclusive("job").acquire().await.unwrap();
    for wait in [&[][..], &["--wait", "100ms"]] {
        let command = [
            &["run", "--key", "job", "--skip"],
            wait,
            &["--", "echo", "ran"],
        ]
        .concat();
        let skipped = store.ended(&command).await;
        let seen = (skipped.status, &*skipped.output, &*skipped.errors);
        assert_eq!(seen, (0, "", ""));
    }
    guard.release().await.unwrap();
    let ran = store
        .ended(&[
            "run",
            "--key",
            "job",
            "--skip",
            "--",
            "sh",
            "-c",
            "echo ran; exit 3",
        ])
        .await;
    assert_eq!((ran.status, &*ran.output), (3, "ran\n"));
    // Only others that hold the lock are a reason.
    let port = "redis://127.0.0.1:1";
    let away = store
        .ended(&["--url", port, "run", "--key", "job", "--skip", "--", "true"])
        .await;
    assert_eq!(away.status, 69, "{away:?}");
}

#[tokio::test]
async fn a_command_that_waits_says_on_which_holder() {
    let store = Store::start().await;
    let mut first = store.running(&[
        "run",
        "--key",
        "backup",
        "--",
        "sh",
        "-c",
        "echo started; sleep 8",
    ]);
    first.line().await;
    let shown = store.ended(&["inspect", "backup", "--json"]).await.json();
    let holder = shown["holders"][0]["client"].as_str().unwrap();
    assert!(holder.starts_with("sh@"), "{holder}");
    let waited = store
        .ended(&["run", "--key", "backup", "--wait", "20s", "--", "true"])
        .await;
    assert_eq!(waited.status, 0, "{waited:?}");
    let line = format!("lockctl: waiting for backup, held by {holder} for ");
    assert!(waited.errors.starts_with(&line), "{waited:?}");
    assert_eq!(first.ended().await.0, 0);
}

#[tokio::test]
async fn warnings_of_the_library_are_printed() {
    let store = Store::start().await;
    let set = ["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"];
    store.server.query::<String>(&set).await;
    let mut command = store.command(&["ls"]);
    command.env("LOCK_NAMESPAC", "orders");
    let warned = super::ended(&mut command).await;
    assert_eq!(warned.status, 0, "{warned:?}");
    for part in [
        "lockctl: warning: ",
        "LOCK_NAMESPAC",
        "may evict a lock",
        "allkeys-lru",
    ] {
        assert!(warned.errors.contains(part), "{part}: {warned:?}");
    }
    // Once, though two processes read the settings.
    let mut command = store.command(&["run", "--key", "k", "--", "true"]);
    command.env("LOCK_NAMESPAC", "orders");
    let warned = super::ended(&mut command).await;
    assert_eq!(warned.status, 0);
    let about = |text: &str| {
        warned
            .errors
            .lines()
            .filter(|line| line.contains(text))
            .count()
    };
    assert_eq!(
        (about("LOCK_NAMESPAC"), about("may evict")),
        (1, 1),
        "{warned:?}"
    );
    let mut command = store.command(&["run", "--json", "--key", "k", "--", "true"]);
    command.env("LOCK_NAMESPAC", "orders");
    let warned = super::ended(&mut command).await;
    let lines = warned.errors.lines().map(serde_json::from_str::<Value>);
    let lines: Vec<_> = lines.collect::<Result<_, _>>().unwrap();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(
        lines.iter().all(|line| line["warning"].is_string()),
        "{lines:?}"
    );
}

#[tokio::test]
async fn a_wrong_command_line_is_json_where_that_is_asked_for() {
    let store = Store::start().await;
    for command in [
        &["--json", "inspect"][..],
        &["run", "--json", "--key", "k", "--wait", "5", "--", "true"],
    ] {
        let refused = store.ended(command).await;
        assert_eq!(refused.status, 2, "{refused:?}");
        let error: Value = serde_json::from_str(&refused.errors).unwrap();
        assert_eq!(error["code"], "usage");
        assert!(
            !error["error"].as_str().unwrap().starts_with("error"),
            "{error}"
        );
    }
    let text = store
        .ended(&["run", "--key", "k", "--wait", "5", "--", "echo", "--json"])
        .await;
    assert!(text.errors.starts_with("error: "), "{text:?}");
}
