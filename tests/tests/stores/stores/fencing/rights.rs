//! The rights of roles, and objects by which a role could mislead the function.

use lock_runtime::fencing::{MIGRATION, STALE};
use lock_tests::{postgres, shared_postgres};
use tokio_postgres::{Client, Error};

use super::{
    super::{role, url_as},
    code, database, fenced, seen,
};

async fn connect_as(role: &str, url: &str) -> Client {
    postgres::connect(&url_as(role, url).await).await
}

/// The statements that the migration names for another role.
fn grants(role: &str) -> Vec<String> {
    let grants = MIGRATION
        .lines()
        .filter(|line| line.starts_with("--     grant "));
    let grants = grants.map(|line| line.trim_start_matches(['-', ' ']));
    grants
        .map(|grant| grant.replace("my_service", role))
        .collect()
}

#[tokio::test]
async fn a_role_needs_the_rights_that_the_migration_names_and_cannot_lower_a_token() {
    let url = database().await;
    let owner = postgres::connect(&url).await;
    let role = role(&owner).await;
    let service = connect_as(&role, &url).await;
    fenced(&owner, "account:7", 7).await.unwrap();

    let grants = grants(&role);
    for (grant, missing) in grants
        .iter()
        .zip(["schema lock_runtime", "function fenced"])
    {
        let refused = fenced(&service, "account:7", 8).await.unwrap_err();
        let refused = refused.as_db_error().unwrap();
        assert_eq!(refused.code().code(), "42501");
        let message = format!("permission denied for {missing}");
        assert_eq!(refused.message(), message);
        owner.batch_execute(grant).await.unwrap();
    }
    assert_eq!(grants.len(), 2);
    fenced(&service, "account:7", 8).await.unwrap();
    assert_eq!(code(fenced(&service, "account:7", 7).await), STALE);
    for statement in [
        "update lock_runtime.seen set fence = 1",
        "delete from lock_runtime.seen",
        "truncate lock_runtime.seen",
        "insert into lock_runtime.seen values ('a', 1)",
        "select from lock_runtime.seen",
        "begin; lock table lock_runtime.seen in share update exclusive mode",
        "drop function lock_runtime.fenced",
        "create table lock_runtime.t ()",
    ] {
        let result = service.batch_execute(statement).await;
        assert_eq!(code(result), "42501", "{statement}");
        service.batch_execute("rollback").await.unwrap();
    }
    assert_eq!(seen(&owner, "account:7").await, Some(8));
}

/// In an earlier version every role with `usage` could call the function.
#[tokio::test]
async fn a_second_installation_keeps_the_callers_and_no_others() {
    let url = database().await;
    let owner = postgres::connect(&url).await;
    let (caller, stranger) = (role(&owner).await, role(&owner).await);
    owner
        .batch_execute(&format!(
            "grant execute on function lock_runtime.fenced to public; \
             grant usage on schema lock_runtime to {caller}"
        ))
        .await
        .unwrap();
    owner.batch_execute(MIGRATION).await.unwrap();
    let usage = format!("grant usage on schema lock_runtime to {stranger}");
    owner.batch_execute(&usage).await.unwrap();
    // And not those that are granted the right on the schema by then.
    owner.batch_execute(MIGRATION).await.unwrap();
    let caller = connect_as(&caller, &url).await;
    fenced(&caller, "account:7", 7).await.unwrap();
    let stranger = connect_as(&stranger, &url).await;
    assert_eq!(code(fenced(&stranger, "account:7", 7).await), "42501");
}

#[tokio::test]
async fn the_migration_needs_a_role_that_may_create_the_schema_or_owns_it() {
    let url = shared_postgres().await.new_database().await;
    let owner = postgres::connect(&url).await;
    let role = role(&owner).await;
    let service = connect_as(&role, &url).await;
    let refused = service.batch_execute(MIGRATION).await.unwrap_err();
    let message = refused.as_db_error().unwrap().message();
    assert!(
        message.starts_with("permission denied for database"),
        "{message}"
    );

    let schema = format!("create schema lock_runtime authorization {role}");
    owner.batch_execute(&schema).await.unwrap();
    for _ in 0..2 {
        service.batch_execute(MIGRATION).await.unwrap();
        fenced(&service, "account:7", 7).await.unwrap();
    }
}

/// Objects that a caller could put before those that the function means.
#[tokio::test]
async fn no_search_path_misleads_the_function() -> Result<(), Error> {
    let client = postgres::connect(&database().await).await;
    client
        .batch_execute(
            "create schema other;
             create table other.seen (resource text primary key, fence bigint);
             create function other.format(text, variadic \"any\") returns text
                 language internal as 'unique_key_recheck';
             create function other.always(bigint, bigint) returns boolean
                 language sql as 'select true';
             create operator other.<= (leftarg = bigint, rightarg = bigint, function = other.always);
             create temporary table seen (resource text primary key, fence bigint);
             set search_path = other, pg_temp, pg_catalog",
        )
        .await?;
    let passes = client
        .query_one("select 7::bigint <= 6::bigint", &[])
        .await?;
    assert!(
        passes.get::<_, bool>(0),
        "the operator does not take precedence"
    );
    fenced(&client, "account:7", 7).await?;
    assert_eq!(code(fenced(&client, "account:7", 6).await), STALE);
    assert_eq!(seen(&client, "account:7").await, Some(7));
    for table in ["other.seen", "pg_temp.seen"] {
        let rows = client.query(&format!("select from {table}"), &[]).await?;
        assert!(rows.is_empty(), "{table}");
    }
    Ok(())
}
