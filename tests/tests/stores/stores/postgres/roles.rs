//! Roles of the database: their rights to locks, and the owner of the schema.

use std::time::Duration;

use lock_runtime::{
    LockClient, LockErrorKind, PostgresOptions, fencing, health::Verdict,
    store::postgres::MIGRATION,
};
use lock_tests::{chain, place::in_time, postgres, shared_postgres};
use tokio::time::timeout;
use tokio_postgres::Client;

use super::{
    super::{role, url_as},
    client_of_new_database, held, number, once,
    schema::{CURRENT, FORMAT},
};

const NAME: &str = "lock:order:42";
const GUARD: &str = "select lock_runtime.guard($1, $2)";
/// The functions of the schema that every role may execute.
const PUBLIC: &str = "select count(*) from pg_proc \
    where pronamespace = 'lock_runtime'::regnamespace \
    and has_function_privilege('public', oid, 'execute')";
/// The schema of a role that means harm. The first look at its version executes its function.
const PLANTED: &str = "create schema lock_runtime; \
    grant usage on schema lock_runtime to public; \
    create table lock_runtime.loot (victim text); \
    grant insert on lock_runtime.loot to public; \
    create function lock_runtime.steal() returns int language plpgsql as \
        'begin insert into lock_runtime.loot values (current_user); return 1; end'; \
    create view lock_runtime.format as select lock_runtime.steal() as version, 1 as since; \
    grant select on lock_runtime.format to public";
const LOOT: &str = "select count(*) from lock_runtime.loot";

async fn execute(client: &Client, statements: &str) {
    let executed = client.batch_execute(statements).await;
    executed.unwrap_or_else(|error| panic!("{statements}: {error:?}"));
}

/// A new database, the connection of its superuser, and a role with the right to connect.
async fn database() -> (String, Client, String) {
    let url = shared_postgres().await.new_database().await;
    let admin = postgres::connect(&url).await;
    let role = role(&admin).await;
    (url, admin, role)
}

/// Lets a role create schemas in the database.
async fn may_create(admin: &Client, role: &str) {
    let grant = format!(
        "do $$ begin execute 'grant create on database ' || quote_ident(current_database()) \
         || ' to {role}'; end $$"
    );
    execute(admin, &grant).await;
}

#[tokio::test]
async fn a_role_with_usage_on_the_schema_calls_no_function() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        fencing::install(&admin).await.unwrap();
        assert_eq!(number(&admin, PUBLIC).await, 0);
        let stranger = role(&admin).await;
        let usage = format!("grant usage on schema lock_runtime to {stranger}");
        execute(&admin, &usage).await;
        // Repeated, as processes do it.
        execute(&admin, MIGRATION).await;
        fencing::install(&admin).await.unwrap();
        let guard = held(&locks, "order:42").await;
        let stranger = postgres::connect(&url_as(&stranger, &url).await).await;
        for call in [
            format!("select lock_runtime.guard('{NAME}', {})", guard.fence()),
            "select lock_runtime.fenced('account:7', 7)".to_owned(),
            "select lock_runtime.lock(array['lock:order:42'])".to_owned(),
            "select lock_runtime.remove('')".to_owned(),
            "select lock_runtime.micros()".to_owned(),
            "select lock_runtime.is_held('\\x01')".to_owned(),
        ] {
            let refused = stranger.batch_execute(&call).await.unwrap_err();
            let refused = refused.as_db_error().unwrap();
            assert_eq!(refused.code().code(), "42501", "{call}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_role_that_may_call_guard_learns_no_token_and_keeps_no_free_lock() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        let stranger = role(&admin).await;
        let grants = format!(
            "grant usage on schema lock_runtime to {stranger}; \
             grant execute on function lock_runtime.guard to {stranger}"
        );
        execute(&admin, &grants).await;
        let stranger = postgres::connect(&url_as(&stranger, &url).await).await;
        let guard = held(&locks, "order:42").await;
        let fence = i64::from(guard.fence());
        for token in [1, fence - 1, fence + 1] {
            let refused = stranger.execute(GUARD, &[&NAME, &token]).await.unwrap_err();
            let refused = refused.as_db_error().unwrap();
            assert_eq!(refused.code().code(), fencing::STALE);
            // The same words on both sides of the token, which could be found by halving otherwise.
            let message = format!(
                "the fencing token {token} is stale: the lock {NAME} was granted again, \
                 with another one"
            );
            assert_eq!(refused.message(), message);
            assert!(!format!("{refused:?}").contains(&fence.to_string()));
        }
        guard.release().await.unwrap();
        execute(&stranger, "begin").await;
        let refused = stranger.execute(GUARD, &[&NAME, &fence]).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code().unwrap().code(), fencing::STALE);
        // The server sends an error before it undoes the transaction, and this one after that.
        stranger.batch_execute("select 1").await.unwrap_err();
        let next = locks.exclusive("order:42").try_acquire().await.unwrap();
        next.unwrap().release().await.unwrap();
    })
    .await;
}

/// The schema of the version before, in which every role with `usage` could call the functions.
async fn set_back(admin: &Client) {
    execute(
        admin,
        "update lock_runtime.format set version = 1; \
         grant execute on all functions in schema lock_runtime to public",
    )
    .await;
}

#[tokio::test]
async fn roles_of_an_older_schema_keep_their_rights_and_others_get_none() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        let (caller, client) = (role(&admin).await, role(&admin).await);
        set_back(&admin).await;
        execute(
            &admin,
            &format!(
                "grant usage on schema lock_runtime to {caller}, {client}; \
                 grant select on lock_runtime.format to {client}; \
                 grant select, insert, update, delete on lock_runtime.record to {client}"
            ),
        )
        .await;
        let old = LockClient::connect(&url_as(&client, &url).await)
            .await
            .unwrap();
        assert_eq!(number(&admin, PUBLIC).await, 6);
        LockClient::connect(&url).await.unwrap();
        assert_eq!(number(&admin, PUBLIC).await, 0);
        assert_eq!(number(&admin, FORMAT).await, i64::from(CURRENT));
        once(old.exclusive("a")).await.unwrap();
        once(old.all(["b", "c"])).await.unwrap();
        let guard = held(&locks, "order:42").await;
        let caller = postgres::connect(&url_as(&caller, &url).await).await;
        let fence = i64::from(guard.fence());
        caller.execute(GUARD, &[&NAME, &fence]).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_client_uses_an_older_schema_that_it_may_not_bring_up_to_date() {
    in_time(async {
        let (url, _, admin) = client_of_new_database().await;
        let client = role(&admin).await;
        set_back(&admin).await;
        execute(
            &admin,
            &format!(
                "grant usage on schema lock_runtime to {client}; \
                 grant select on lock_runtime.format to {client}; \
                 grant select, insert, update, delete on lock_runtime.record to {client}"
            ),
        )
        .await;
        let locks = LockClient::connect(&url_as(&client, &url).await)
            .await
            .unwrap();
        once(locks.exclusive("a")).await.unwrap();
        let health = locks.health().await;
        assert_eq!(health.verdict(), Verdict::Degraded, "{health}");
        let finding = &health.findings()[0];
        assert_eq!(finding.code, "public_functions", "{health}");
        for word in ["guard", "swap", "every role"] {
            assert!(finding.message.contains(word), "{health}");
        }
        assert!(finding.remedy.contains("MIGRATION"), "{health}");
        execute(&admin, MIGRATION).await;
        let health = locks.health().await;
        assert_eq!(health.verdict(), Verdict::Healthy, "{health}");
    })
    .await;
}

#[tokio::test]
async fn the_schema_of_another_role_is_refused_before_it_is_read() {
    in_time(async {
        let (url, admin, tenant) = database().await;
        may_create(&admin, &tenant).await;
        let tenant_url = url_as(&tenant, &url).await;
        let planted = postgres::connect(&tenant_url).await;
        execute(&planted, PLANTED).await;
        let service = role(&admin).await;
        for url in [url_as(&service, &url).await, url] {
            let error = LockClient::connect(&url).await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::Forbidden, "{error:#}");
            let message = chain(&error);
            let belongs = format!("belongs to the role {tenant}");
            for word in [&*belongs, "schema_owner", "drop the schema"] {
                assert!(message.contains(word), "{message}");
            }
            let lazy = LockClient::connect_lazy(&url).unwrap();
            let error = once(lazy.exclusive("a")).await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::Forbidden, "{error:#}");
            let health = lazy.health().await;
            assert_eq!(health.verdict(), Verdict::Unavailable);
            let finding = &health.findings()[0];
            assert_eq!(finding.code, "missing_rights", "{health}");
            assert!(finding.message.contains(&belongs), "{health}");
        }
        for migration in [MIGRATION, fencing::MIGRATION] {
            let refused = admin.batch_execute(migration).await.unwrap_err();
            let refused = refused.as_db_error().unwrap();
            assert_eq!(refused.code().code(), "42501");
            assert!(refused.message().contains(&tenant), "{refused:?}");
        }
        assert_eq!(number(&planted, LOOT).await, 0);
    })
    .await;
}

/// The owner of the schema has let another role create objects in it.
#[tokio::test]
async fn a_function_of_another_role_is_refused() {
    in_time(async {
        let (url, _, admin) = client_of_new_database().await;
        let (tenant, service) = (role(&admin).await, role(&admin).await);
        for object in ["function lock_runtime.swap", "table lock_runtime.record"] {
            execute(&admin, &format!("alter {object} owner to {tenant}")).await;
            let error = LockClient::connect(&url_as(&service, &url).await).await;
            assert!(chain(&error.unwrap_err()).contains(&tenant));
            execute(&admin, &format!("alter {object} owner to postgres")).await;
        }
    })
    .await;
}

#[tokio::test]
async fn the_schema_may_belong_to_the_owner_of_the_database_or_to_a_role_that_is_named() {
    in_time(async {
        let (url, admin, owner) = database().await;
        may_create(&admin, &owner).await;
        let owner_url = url_as(&owner, &url).await;
        LockClient::connect(&owner_url).await.unwrap();
        let service = role(&admin).await;
        let grants = MIGRATION.lines().filter(|line| line.ends_with(" to app;"));
        let grants = grants.map(|line| line.trim_start_matches(['-', ' ']));
        let grants: String = grants
            .map(|grant| grant.replace(" to app", &format!(" to {service}")))
            .collect();
        execute(&admin, &grants).await;
        let service_url = url_as(&service, &url).await;
        let refused = LockClient::connect(&service_url).await.unwrap_err();
        assert!(chain(&refused).contains(&owner));

        let trusting = PostgresOptions::new().schema_owner(&owner);
        let builder = LockClient::builder().postgres(trusting);
        let named = builder.connect(&service_url).await.unwrap();
        once(named.exclusive("a")).await.unwrap();
        let with_parameter = format!("{service_url}?schema_owner={owner}");
        let named = LockClient::connect(&with_parameter).await.unwrap();
        once(named.exclusive("a")).await.unwrap();
        let of_another = format!("{service_url}?schema_owner={service}");
        LockClient::connect(&of_another).await.unwrap_err();

        // A role could make the user one of its members.
        let member = format!("grant {owner} to {service}");
        execute(&admin, &member).await;
        LockClient::connect(&service_url).await.unwrap_err();
        let alter = format!(
            "do $$ begin execute 'alter database ' || quote_ident(current_database()) \
             || ' owner to {owner}'; end $$"
        );
        execute(&admin, &alter).await;
        let locks = LockClient::connect(&service_url).await.unwrap();
        once(locks.exclusive("a")).await.unwrap();
    })
    .await;
}

/// Every role that may connect can take any advisory lock.
#[tokio::test]
async fn no_advisory_lock_keeps_the_first_client_out() {
    in_time(async {
        let (url, admin, stranger) = database().await;
        let stranger = postgres::connect(&url_as(&stranger, &url).await).await;
        execute(&stranger, "select pg_advisory_lock(7813573191325087086)").await;
        let locks = LockClient::connect(&url).await.unwrap();
        once(locks.exclusive("a")).await.unwrap();
        let installed = timeout(Duration::from_secs(10), fencing::install(&admin)).await;
        installed.expect("it waits for the stranger").unwrap();
    })
    .await;
}

/// Functions and operators in the search path of clients, whose types fit arguments better than
/// those of PostgreSQL.
const NEIGHBOUR: &str = "create table public.loot (what text); \
    grant insert on public.loot to public; \
    create function public.unnest(text[]) returns setof text language plpgsql as \
        'begin insert into public.loot values (''unnest''); \
        return query select pg_catalog.unnest($1); end'; \
    create function public.array_agg_step(bigint[], bigint) returns bigint[] language plpgsql as \
        'begin insert into public.loot values (''array_agg''); return $1 || $2; end'; \
    create aggregate public.array_agg(bigint) (sfunc = public.array_agg_step, stype = bigint[]); \
    create function public.is_equal(oid, regnamespace) returns boolean language plpgsql as \
        'begin insert into public.loot values (''regnamespace''); return true; end'; \
    create operator public.= (leftarg = oid, rightarg = regnamespace, function = public.is_equal); \
    create function public.is_equal(oid, int) returns boolean language plpgsql as \
        'begin insert into public.loot values (''oid = int''); return true; end'; \
    create operator public.= (leftarg = oid, rightarg = int, function = public.is_equal)";

#[tokio::test]
async fn functions_and_operators_of_a_neighbour_are_not_called() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        let neighbour = role(&admin).await;
        execute(
            &admin,
            &format!("grant create on schema public to {neighbour}"),
        )
        .await;
        let stranger = postgres::connect(&url_as(&neighbour, &url).await).await;
        execute(&stranger, NEIGHBOUR).await;
        // They are called by statements that do not name a schema.
        let called = admin
            .query("select unnest($1::text[])", &[&vec!["a"]])
            .await;
        called.unwrap();
        let planted = stranger.query("select from public.loot", &[]).await;
        assert!(!planted.unwrap().is_empty());
        execute(&stranger, "delete from public.loot").await;

        set_back(&admin).await;
        let grant = format!("grant usage on schema lock_runtime to {neighbour}");
        execute(&admin, &grant).await;
        let other = LockClient::connect(&url).await.unwrap();
        let guard = held(&locks, "a").await;
        assert!(other.exclusive("a").try_acquire().await.unwrap().is_none());
        other.inspect("a").await.unwrap();
        locks.health().await;
        guard.release().await.unwrap();
        once(other.all(["a", "b"])).await.unwrap();
        let called = stranger.query("select distinct what from public.loot", &[]);
        let called: Vec<String> = called.await.unwrap().iter().map(|row| row.get(0)).collect();
        assert!(called.is_empty(), "{called:?}");
    })
    .await;
}
