//! Tokens and arguments that are refused, and with which error.

use std::iter;

use lock_runtime::fencing::STALE;

use super::{CALL, client, code, fenced, seen};

#[tokio::test]
async fn a_smaller_token_is_refused_and_an_equal_one_is_not() {
    let client = client().await;
    for fence in [5, 7, 7] {
        fenced(&client, "account:7", fence).await.unwrap();
        assert_eq!(seen(&client, "account:7").await, Some(fence));
    }
    let error = fenced(&client, "account:7", 6).await.unwrap_err();
    let error = error.as_db_error().unwrap();
    assert_eq!(error.code().code(), STALE);
    assert_eq!(
        error.message(),
        "the fencing token 6 is stale: account:7 has seen a later one"
    );
    assert!(error.detail().is_some() && error.hint().is_some());
    assert_eq!(
        (error.schema(), error.table()),
        (Some("lock_runtime"), Some("seen"))
    );
    assert_eq!(seen(&client, "account:7").await, Some(7));

    for fence in [7, 8] {
        fenced(&client, "account:7", fence).await.unwrap();
    }
    // Another resource has seen nothing.
    fenced(&client, "account:8", 1).await.unwrap();
}

/// By a mistake, such as a time in another unit, or on purpose: it would refuse all later holders.
#[tokio::test]
async fn a_token_far_ahead_of_the_clock_is_refused_and_changes_nothing() {
    const HOUR: i64 = 60 * 60 * 1_000_000;
    let client = client().await;
    let now = super::micros();
    let milliseconds_times_a_million = now / 1000 * 1_000_000;
    for fence in [now + 25 * HOUR, milliseconds_times_a_million, i64::MAX] {
        let error = fenced(&client, "account:7", fence).await.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), "22023", "{fence}");
        let said = format!("{fence} is not a fencing token: it is later than the clock");
        assert!(error.message().contains(&said), "{error}");
        let hint = error.hint().unwrap();
        assert!(hint.contains("microseconds since 1970"), "{hint}");
    }
    assert_eq!(seen(&client, "account:7").await, None);
    for fence in [now, now + 23 * HOUR] {
        fenced(&client, "account:7", fence).await.unwrap();
    }
}

/// The caller chooses its time zone, in which a day may last longer than a week.
#[tokio::test]
async fn the_time_zone_of_the_caller_moves_no_bound() {
    const WEEK: i64 = 7 * 24 * 60 * 60 * 1_000_000;
    let client = client().await;
    let mut is_long = false;
    for day in 0..=365 {
        let other = (day + 129) % 365;
        let zone = format!("set timezone = 'AAA-167BBB167,{day}/0,{other}/0'");
        client.batch_execute(&zone).await.unwrap();
        let tomorrow = "select now() + interval '1 day' > now() + interval '200 hours'";
        let row = client.query_one(tomorrow, &[]).await.unwrap();
        if row.get(0) {
            is_long = true;
            break;
        }
    }
    assert!(is_long, "no time zone has a long day");
    let refused = fenced(&client, "account:7", super::micros() + WEEK).await;
    assert_eq!(code(refused), "22023");
}

/// Frameworks repeat a transaction that fails with one of these classes.
#[test]
fn the_error_is_of_no_class_that_is_repeated() {
    for class in ["08", "25", "40", "53", "55", "57", "58"] {
        assert!(!STALE.starts_with(class));
    }
}

#[tokio::test]
async fn a_wrong_argument_does_not_pass() {
    let client = client().await;
    let (a, empty) = (Some("a"), Some(""));
    for (resource, fence, expected) in [
        (None, Some(1_i64), "22004"),
        (a, None, "22004"),
        (None, None, "22004"),
        (empty, Some(1), "22023"),
        (a, Some(0), "22023"),
        (a, Some(-1), "22023"),
        (a, Some(i64::MIN), "22023"),
    ] {
        let result = client.execute(CALL, &[&resource, &fence]).await;
        let error = result.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), expected, "{resource:?} {fence:?}");
        assert!(
            error.message().starts_with("lock_runtime.fenced: "),
            "{error}"
        );
    }
    let rows = client.query("select from lock_runtime.seen", &[]).await;
    assert!(rows.unwrap().is_empty());
}

#[tokio::test]
async fn any_text_names_a_resource_of_its_own() {
    let client = client().await;
    let names = [
        "'; drop table lock_runtime.seen; --",
        "%s % %%s %1$I",
        "\" \\ \\' E'\\x27'",
        "$fenced$ $$ $install$",
        "a",
        "A",
        "a ",
        " a",
        "\u{e9}",
        "e\u{301}",
        "line\nline\r\t\u{1}",
        "\u{1f512} \u{202e} \u{feff}",
        "null",
    ];
    for (fence, name) in iter::zip(10.., names) {
        fenced(&client, name, fence).await.unwrap();
    }
    for (fence, name) in iter::zip(10.., names) {
        assert_eq!(seen(&client, name).await, Some(fence), "{name:?}");
        let error = fenced(&client, name, fence - 1).await.unwrap_err();
        let message = error.as_db_error().unwrap().message();
        assert!(message.contains(name), "{message:?} {name:?}");
    }
}

/// Two long names must not be taken for one, as they would be if they were cut.
#[tokio::test]
async fn a_name_that_the_database_cannot_keep_is_an_error() {
    let client = client().await;
    let random = |_| char::from(rand::random_range(b'a'..=b'z'));
    let long: String = (0..10_000).map(random).collect();
    assert_eq!(code(fenced(&client, &long, 1).await), "54000");
    assert_eq!(code(fenced(&client, "a\0b", 1).await), "22021");
    let fits: String = (0..2_000).map(random).collect();
    fenced(&client, &fits, 2).await.unwrap();
    assert_eq!(code(fenced(&client, &fits, 1).await), STALE);
}
