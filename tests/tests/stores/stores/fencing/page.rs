//! The SQL of the page on fencing, executed as the page shows it.

use super::{client, code, fenced, micros, seen};

const PAGE: &str = concat!(
    include_str!("../../../../../lock-runtime/guide/fencing.md"),
    include_str!("../../../../../lock-runtime/guide/fencing/promise.md"),
);
const DAY: i64 = 24 * 60 * 60 * 1_000_000;

/// The blocks of SQL in which `text` occurs.
fn block(text: &str) -> String {
    let blocks = PAGE.split("```sql\n").skip(1);
    let mut blocks = blocks.filter_map(|rest| Some(rest.split_once("```")?.0));
    blocks
        .find(|block| block.contains(text))
        .unwrap()
        .to_owned()
}

#[tokio::test]
async fn the_transaction_of_the_page_compares_and_writes() {
    let client = client().await;
    let table = "create table account (id bigint, balance bigint);
        insert into account values (7, 100)";
    client.batch_execute(table).await.unwrap();
    let transaction = block("begin;");
    for expected in [90, 80] {
        client.batch_execute(&transaction).await.unwrap();
        let row = client.query_one("select balance from account", &[]).await;
        assert_eq!(row.unwrap().get::<_, i64>(0), expected);
    }
    let token = seen(&client, "account:7").await.unwrap();
    fenced(&client, "account:7", token + 1).await.unwrap();
    let refused = client.batch_execute(&transaction).await;
    assert_eq!(code(refused), lock_runtime::fencing::STALE);
}

#[tokio::test]
async fn the_deletion_of_the_page_leaves_the_tokens_of_a_week() {
    let client = client().await;
    for days in [0, 6, 8] {
        let granted = micros() - DAY * days;
        fenced(&client, &days.to_string(), granted).await.unwrap();
    }
    client.batch_execute(&block("delete from")).await.unwrap();
    let query = "select resource from lock_runtime.seen order by resource";
    let rows = client.query(query, &[]).await.unwrap();
    let left: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(left, ["0", "6"]);
}

#[tokio::test]
async fn the_repair_of_the_page_lets_later_holders_write_and_no_earlier_ones() {
    let client = client().await;
    let far = "insert into lock_runtime.seen values ('account:7', 9223372036854775807)";
    client.batch_execute(far).await.unwrap();
    let before = micros();
    fenced(&client, "account:8", before + DAY / 2)
        .await
        .unwrap();
    let stale = lock_runtime::fencing::STALE;
    assert_eq!(code(fenced(&client, "account:7", before).await), stale);
    client
        .batch_execute(&block("update lock_runtime.seen"))
        .await
        .unwrap();
    assert_eq!(code(fenced(&client, "account:7", before).await), stale);
    fenced(&client, "account:7", micros()).await.unwrap();
    assert_eq!(seen(&client, "account:8").await, Some(before + DAY / 2));
}
